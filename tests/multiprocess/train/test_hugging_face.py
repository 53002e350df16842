"""A model that knows nothing of the runtime trains in it unchanged, to the same bits at every world size."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

pytest.importorskip("transformers", reason="transformers is an optional dependency")


def test_a_hugging_face_model_trains_in_ten_lines_to_the_same_bits_at_every_world_size(run_cases):
    found = run_cases("hugging_face_cases.py", "llama:1", "llama:3")
    alone, three = found["llama:1"]["result"], found["llama:3"]["result"]
    assert alone is not None, found["llama:1"]["said"]
    assert three is not None, found["llama:3"]["said"]
    assert alone["losses"][-1] < alone["losses"][0] - 0.5
    assert alone == three
