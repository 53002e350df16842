"""`argosy kill --signal`: who gets it when some are gone already."""

import pytest

from argosy.cli import stop
from argosy.cli.app import main
from argosy.cli.connection import Target
from argosy.errors import NotFoundError


class Gang:
    """A controller whose gang loses its other ranks as soon as so many have got the signal."""

    def __init__(self, num_reached):
        self.left = num_reached

    def resolve(self, word, *, to_act):
        processes = [
            {
                "attempt": f"r1.train.{i}.0",
                "role": "train",
                "index": i,
                "pid": 9,
                "state": "running",
            }
            for i in range(3)
        ]
        role = {"role": "train", "gang": True, "processes": processes}
        return Target("r1", None, None), {"run": "r1", "roles": [role]}

    def post(self, path, body):
        if not self.left:
            raise NotFoundError("there is no live process", fix="")
        self.left -= 1


@pytest.mark.parametrize(
    ("num_reached", "code", "said"),
    [
        (3, 0, "SIGUSR1 sent to 3 processes of r1\n"),
        (1, 0, "SIGUSR1 sent to 1 process of r1\n"),
        (0, 66, ""),
    ],
)
def test_a_signal_goes_to_those_that_are_left(monkeypatch, capsys, num_reached, code, said):
    monkeypatch.setattr(stop, "connect", lambda: Gang(num_reached))
    assert main(["kill", "r1", "--signal", "usr1"]) == code
    assert capsys.readouterr().out == said
