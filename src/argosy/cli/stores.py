"""Which store and which checkpoint the words of a command name: a directory, a step of it, a run, the memory of its peers, or an address of an object store.

Used by the verbs of `argosy checkpoint`.
"""

from __future__ import annotations

from pathlib import Path

from argosy.checkpoint import names
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.peers import joining, notes
from argosy.checkpoint.peers.recalls import PeerListing
from argosy.checkpoint.tiers.buckets import Bucket
from argosy.checkpoint.tiers.ciphers import Secret
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.cli.arguments import Arguments, is_whole_number
from argosy.errors import ArgosyError, ConfigError, NotFoundError

_FOLDER = "checkpoints"
"""Where a trainer saves, in its run's directory."""


def store_of(arguments: Arguments) -> Listing:
    """A store that is there: on disk, in an object store, or with `--peers` in the memory of hosts."""
    word = arguments.words[0]
    if arguments.get("peers"):
        return peers_of(word)
    return remote_of(arguments, word) if "://" in word else store_on_disk(word)


def store_on_disk(word: str) -> Listing:
    """A directory that is there, or that of a run; a step-… directory stands for its store, a run's for its checkpoints."""
    path = Path(word)
    if not path.is_dir():
        return Listing(_store_of_run(word))
    if names.step_of(path.absolute().name) is not None:
        return Listing(path.absolute().parent)
    below = path / _FOLDER
    return Listing(below if below.is_dir() and not Listing(path).steps() else path)


def _store_of_run(word: str) -> Path:
    from argosy.cli.rundirs import find_run_directory

    directory = None if "/" in word else find_run_directory(word)
    if directory is None:
        raise NotFoundError(
            f"{word} is neither a directory nor a run",
            fix="give the directory that a run saves into, or the run: `argosy ps --all` lists them",
        )
    if not (directory / _FOLDER).is_dir():
        raise NotFoundError(
            f"run {directory.name} has no checkpoints",
            fix=f"if its program saves elsewhere, give that directory; the run's own is {directory}",
        )
    return directory / _FOLDER


def peers_of(word: str) -> PeerListing:
    """What the peers of a store or a run hold of it, by what it has noted about them; its checkpoints need not be there any more."""
    path = Path(word).absolute()
    if not path.is_dir() and "/" not in word:
        from argosy.cli.rundirs import find_run_directory

        path = find_run_directory(word) or path
    # The checkpoints of a run lie below it, and a step below those.
    for directory in (path, *path.parents[:2]):
        peers = notes.noted(directory)
        if peers is not None:
            return PeerListing(joining.route_of(peers), peers.hosts, peers.run, peers.host)
    raise NotFoundError(
        f"{word} has no {notes.NOTE}: it has no peers, or nothing was saved with them",
        fix="give the run, or the directory that its program saves into with peers=…",
    )


def path_of(word: str, usage: str) -> Path:
    """A path that may not be there yet; an address would become directories of that name."""
    if "://" in word:
        raise ConfigError(f"{word} is an address, not a path", fix=f"usage: argosy {usage}")
    return Path(word)


def remote_of(arguments: Arguments, word: str, *, is_made: bool = False) -> RemoteListing:
    """An object store, with the key that `--secret` names."""
    if "://" not in word:
        raise ConfigError(
            f"{word} is no address of an object store",
            fix="use s3://bucket/prefix, gs://…, az://… or file:///directory",
        )
    word = word.rstrip("/")
    if step_words(word):
        word = word.rpartition("/")[0]
    secret = arguments.get("secret")
    bucket = Bucket(word, is_made=is_made)
    return RemoteListing(bucket, Secret.read(secret) if secret else None)


def step_words(word: str) -> list[str]:
    """The step that an address or a path ends with."""
    step = names.step_of(word.rstrip("/").rpartition("/")[2])
    return [] if step is None else [str(step)]


def wanted_step(listing: Listing, words: list[str]) -> int:
    """The step that was named, or the newest."""
    return step_of(words[0]) if words else newest_of(listing)


def target_of(arguments: Arguments) -> tuple[Listing, int | None]:
    """The store, and the step that was named: by a word of its own or by its directory."""
    listing = store_of(arguments)
    if len(arguments.words) > 1:
        return listing, step_of(arguments.words[1])
    return listing, names.step_of(Path(arguments.words[0]).absolute().name)


def folder_of(arguments: Arguments) -> Folder:
    """The checkpoint that was named, or the newest."""
    listing, step = target_of(arguments)
    return listing.folder(newest_of(listing) if step is None else step)


def directory_of(listing: Listing | None, word: str) -> Path:
    """A step of the store, or a directory."""
    path = Path(word)
    if (listing is None or not is_whole_number(word)) and path.is_dir():
        if not (path / names.MANIFEST).exists() and (steps := Listing(path).steps()):
            raise ConfigError(
                f"{word} is a store, not a checkpoint",
                fix=f"give one of its steps: {path / names.step_name(steps[-1])}",
            )
        return path.absolute()
    if listing is None:
        raise NotFoundError(
            f"{word} is no directory", fix="give a step-… directory, or the store before the steps"
        )
    return listing.directory_of(step_of(word)).absolute()


def step_of(word: str) -> int:
    """A step as a number or as the name of its directory."""
    step = names.step_of(Path(word).name)
    if step is not None:
        return step
    if not is_whole_number(word):
        raise ConfigError(f"{word!r} is no step", fix="a step is a whole number, e.g. 1000")
    return names.check_step(int(word))


def newest_of(listing: Listing) -> int:
    """The newest step; NotFoundError when there is none."""
    newest = next(iter(listing.candidates()), None)
    if newest is None:
        raise NotFoundError(
            f"{listing.where} has no checkpoint", fix="give the directory that a run saves into"
        )
    return newest


def bytes_of(listing: Listing, step: int) -> int:
    """Of all files of a checkpoint; 0 when it cannot be read."""
    try:
        with listing.folder(step) as folder:
            return sum(record.size for record in folder.manifest.files.values())
    except ArgosyError:
        return 0
