"""What may be said on the command line of the simulator."""

import pytest

from argosy.testing.campaign import main


@pytest.mark.parametrize("seeds", ["5-1", "x", "-"])
def test_seeds_that_are_none_are_refused(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["--seeds", seeds])
    assert "error: argument --seeds" in capsys.readouterr().err
