"""The command line is read by one table; what is not in it is refused with the nearest that is."""

import json

import pytest

from argosy.cli.app import find_verb, main
from argosy.cli.arguments import parse, parse_bytes
from argosy.cli.connection import parse_target
from argosy.cli.stop import signal_name
from argosy.cli.verbs import VERBS
from argosy.errors import ConfigError


def read(text):
    verb, rest = find_verb(text.split())
    return parse(verb, rest)


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        read(text)
    return caught.value


def test_options_may_stand_before_and_after_the_script():
    arguments = read("run -n 4 train.py --name x --detach -- --steps 3")
    assert arguments.words == ["train.py"]
    assert arguments.options == {"ranks": 4, "name": "x", "detach": True}
    assert arguments.rest == ["--steps", "3"]


@pytest.mark.parametrize("text", ["run -n4 a.py", "run -n=4 a.py", "run -n 4 a.py"])
def test_values_may_be_attached(text):
    assert read(text).get("ranks") == 4


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint gc store --best --dry",
        "checkpoint export store 50 --out --json",
        "checkpoint pin store 50 --why --jsno",
        "run --name -n 4 a.py",
        "run --name -n4 a.py",
        "run --name -h",
    ],
)
def test_an_option_is_no_value_of_the_one_before(text):
    assert "is an option" in refusal(text).what


def test_what_looks_like_an_option_can_be_a_value_all_the_same():
    assert read("checkpoint pin store 50 --why=--json").get("why") == "--json"


def test_repeatable_options_keep_every_value():
    assert read("run --env A=1 --env B=2=3 a.py").get("env") == ["A=1", "B=2=3"]


def test_everything_after_the_dashes_is_the_programs():
    arguments = read("run -- echo --name x -- y")
    assert arguments.words == []
    assert arguments.rest == ["echo", "--name", "x", "--", "y"]


def test_an_unknown_option_after_the_script_names_the_dashes():
    error = refusal("run train.py --learning-rate 3")
    assert "--learning-rate after train.py" in error.what
    assert "argosy run train.py -- --learning-rate" in error.fix


def test_a_word_after_the_script_names_the_dashes():
    assert "argosy run train.py -- data" in refusal("run train.py data").fix


def test_a_misspelt_option_names_the_nearest():
    assert "`--threads`" in refusal("run --thread 3 a.py").fix


@pytest.mark.parametrize(
    "text",
    ["run -n 0 a.py", "run -n -2 a.py", "run -n two a.py", "run --spares -1 a.py", "run --cpus 0 a.py",
     "run --cpus nan a.py", "run --memory lots a.py", "run --memory inf a.py", "run --memory 1e400G a.py",
     "run --memory nan a.py", "run --memory 1e30 a.py", "checkpoint gc s --free inf", "run --memory 0 a.py", "run --priority high a.py",
     "logs --tail x", "run -n", "run a.py --name", "run --detach=yes a.py"],
)  # fmt: skip
def test_wrong_values_are_refused(text):
    assert refusal(text).fix


@pytest.mark.parametrize(
    "words",
    [["queue", "cancel", ""], ["stop", ""], ["kill", ""], ["kill", "r1", "--signal", ""], ["kill", "r1", "--signal="],
     ["run", "--name", "", "a.py"], ["run", ""], ["checkpoint", "show", "s", ""]],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_word_is_refused(words):
    verb, rest = find_verb(words)
    with pytest.raises(ConfigError, match="is empty") as caught:
        parse(verb, rest)
    assert caught.value.fix


def test_a_list_of_modules_and_a_reason_may_be_empty():
    verb, rest = find_verb(["run", "--preload", "", "a.py"])
    assert parse(verb, rest).get("preload") == ""
    verb, rest = find_verb(["stop", "--reason", ""])
    assert parse(verb, rest).get("reason") == ""


@pytest.mark.parametrize("text", ["ps a b", "up now", "queue cancel", "ps -- x", "queue nonsense"])
def test_wrong_words_are_refused(text):
    assert refusal(text)


def test_two_word_verbs_are_found_before_one_word_verbs():
    assert find_verb(["queue", "add", "x.py"])[0].name == "queue add"
    assert find_verb(["queue"])[0].name == "queue"


def test_an_unknown_verb_names_the_nearest(capsys):
    assert main(["stauts"]) == 64
    assert "`argosy status`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("queue ad x.py", "`argosy queue add`"), ("queue list", "`argosy queue ls`"), ("queue zzz", "has ls, add, cancel"),
        ("checkpoint", "argosy help checkpoint"), ("checkpoint list s", "`argosy checkpoint ls`"),
        ("chekpoint ls", "`argosy checkpoint`"), ("submit x.py", "`argosy queue add`"), ("ls", "`argosy ps`"),
        ("explain", "`argosy why`"), ("zzzz", "`argosy help`"), ("doctor --jsn", "`--json`"),
        ("help quue", "`argosy queue`"), ("help queue ad", "`argosy queue add`"),
    ],
)  # fmt: skip
def test_an_unknown_verb_names_what_was_meant(words, fix, capsys):
    assert main(words.split()) == 64
    assert fix in capsys.readouterr().err


@pytest.mark.parametrize("words", ["help queue add", "queue add --help", "queue add -h"])
def test_help_of_a_verb_of_two_words(words, capsys):
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith("usage: argosy queue add ")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("help run foo", "run [options] SCRIPT"), ("help queue add x.py", "queue add [options]"),
        ("help checkpoint show s 5", "checkpoint show STORE"), ("help help run", "help [VERB...]"),
    ],
)  # fmt: skip
def test_what_follows_a_verb_does_not_hide_its_help(words, usage, capsys):
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith(f"usage: argosy {usage}")


def test_an_option_is_no_second_word(capsys):
    assert main(["checkpoint", "--json"]) == 64
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["message"] == "`argosy checkpoint` needs a second word"
    assert "one of ls, show" in told["fix"]


@pytest.mark.parametrize("words", ["help checkpoint", "checkpoint --help", "checkpoint -h"])
def test_help_of_a_first_word_lists_what_may_follow(words, capsys):
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "argosy checkpoint verify" in text
    assert "Read every byte" in text or "read every byte" in text


def test_a_script_typed_as_a_verb_names_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zzz.py").write_text("")
    assert main(["zzz.py"]) == 64
    assert "argosy run zzz.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("4G", 4 << 30), ("1.5k", 1536), ("2MiB", 2 << 20), ("1gb", 1 << 30)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "1e3"], ids=lambda text: text[:4])
def test_what_is_no_whole_number_is_refused_wherever_one_is_typed(number, tmp_path, capsys):
    (tmp_path / "store").mkdir()
    for command in ("show", "verify", "pin"):
        assert main(["checkpoint", command, str(tmp_path / "store"), number]) == 64
    with pytest.raises(ConfigError):
        parse_target(f"run/train/{number}")
    assert "a bug of ours" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ps"], ["run", "a.py", "--"], ["run"], ["run", "--", "echo"]])
def test_a_word_that_is_not_text_is_refused_by_name(words, capsys):
    assert main([*words, "caf\udce9"]) == 64
    told = capsys.readouterr().err
    assert r"'caf\udce9' is not UTF-8 text" in told
    assert "fix:" in told


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v.name)
def test_every_verb_has_help_with_an_example(verb, capsys):
    assert main([*verb.name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: argosy {verb.usage}" in text
    assert f"argosy {verb.name.split()[0]}" in text.split("example", 1)[1]


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v.name)
def test_every_example_of_the_help_is_valid(verb):
    import shlex

    for example in verb.examples:
        words = shlex.split(example)[1:]
        found, rest = find_verb(words)
        parse(found, rest)


def test_the_mend_of_a_misplaced_argument_is_the_whole_line_with_our_own_options_kept():
    error = refusal("run -n 4 train.py --steps 20 --name big --lr=0.1 -- --seed 1")
    assert "argosy run -n 4 train.py --name big -- --steps 20 --lr=0.1 --seed 1" in error.fix


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("run --nproc_per_node=4 train.py", "-n"),
        ("run --rank 4 train.py", "-n"),
        ("run --world_size 4 train.py", "-n"),
        ("run --max-restarts 2 train.py", "--restart"),
        ("run train.py --nproc-per-node 4", "-n"),
        ("run -d train.py", "--detach"),
        ("ps -a", "--all"),
        ("logs -n 20", "--tail"),
        ("logs --follow", "-f"),
    ],
)
def test_the_options_of_other_tools_are_answered_with_ours(line, meant):
    assert f"did you mean `{meant}`?" in refusal(line).fix


@pytest.mark.parametrize("text", ["stauts --json", "run --json absent.py", "ps --json a b"])
def test_an_error_is_json_on_stdout_too_when_json_was_asked_for(text, capsys):
    assert main(text.split()) == 64
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert set(error) == {"code", "message", "fix"}
    assert error["code"] == 64
    assert printed.err == f"argosy: {error['message']}\n  fix: {error['fix']}\n"


@pytest.mark.parametrize("text", ["SIGUSR1", "usr1", "USR1", "10"])
def test_a_signal_may_be_named_in_several_ways(text):
    assert signal_name(text) == "SIGUSR1"


@pytest.mark.parametrize(
    ("text", "fix"),
    [("kil", "`SIGKILL`"), ("SIGTREM", "`SIGTERM`"), ("0", "kill -l"), ("999", "kill -l"), ("sigfoo", "kill -l")],
)  # fmt: skip
def test_a_signal_that_there_is_not_is_refused(text, fix):
    with pytest.raises(ConfigError, match="there is no signal") as caught:
        signal_name(text)
    assert fix in caught.value.fix


def test_an_argument_of_the_program_does_not_ask_for_json(capsys):
    assert main(["run", "absent.py", "--", "--json"]) == 64
    assert capsys.readouterr().out == ""
