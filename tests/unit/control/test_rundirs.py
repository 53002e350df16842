import json
import os
import stat

from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.commands import without_values
from argosy.control.rundirs import make_run_directory
from argosy.protocol.facts import RunSubmitted


def test_a_run_directory_tells_the_spec_without_any_value(tmp_path):
    role = RoleSpec(command=["train", "--fast"], env={"API_KEY": "value-1"}, secrets=["TOKEN"])
    fact = RunSubmitted(
        run="r1",
        name="n",
        spec=without_values(RunSpec(roles={"main": role})),
        env_blob="digest",
        env_names=["HOME", "PATH"],
        secret_blobs={"TOKEN": "other-digest"},
    )
    directory = tmp_path / "r1"
    make_run_directory(str(directory), fact)
    make_run_directory(str(directory), fact)
    assert sorted(os.listdir(directory)) == ["errors", "exec", "logs", "spec.json"]
    assert stat.S_IMODE(os.stat(directory / "logs").st_mode) == 0o700
    text = (directory / "spec.json").read_text()
    assert "value-1" not in text
    spec = json.loads(text)
    assert spec["spec"]["roles"]["main"]["command"] == ["train", "--fast"]
    assert list(spec["spec"]["roles"]["main"]["env"]) == ["API_KEY"]
    assert spec["env_names"] == ["HOME", "PATH"]
