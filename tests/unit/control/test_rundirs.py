import json
import os
import stat

from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.commands import without_values
from argosy.control.rundirs import make_run_directory, write_end
from argosy.protocol.facts import Event, RunEnded, RunSubmitted


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


def ended(outcome="failed"):
    return Event(seq=7, at=12.5, fact=RunEnded(run="r1", outcome=outcome, exit_code=3, reason="x"))


def test_the_end_of_a_run_is_written_once_into_its_directory(tmp_path):
    write_end(str(tmp_path), ended())
    write_end(str(tmp_path), ended("succeeded"))
    end = json.loads((tmp_path / "end.json").read_text())
    assert (end["at"], end["fact"]["outcome"], end["fact"]["exit_code"]) == (12.5, "failed", 3)
    assert os.listdir(tmp_path) == ["end.json"]


def test_a_directory_that_was_removed_is_not_made_again_for_the_end(tmp_path):
    write_end(str(tmp_path / "r1"), ended())
    assert not os.listdir(tmp_path)
