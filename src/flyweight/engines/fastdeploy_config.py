"""What the FastDeploy drop-in reads: the old config, `config.flyweight`, and version.yaml.

Every call of the manager looks its strategy up in `STRATEGIES`. `ipc` and `ipc_async` are the
same here: the publisher chooses the transport. `rsync` gets a named version from the publisher,
over the network if that is on another host, or else from snapshots.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from logging import getLogger
from pathlib import Path
from typing import Any

from flyweight.checks import check_seconds, check_version
from flyweight.errors import MissingDependency, PeerRefused, SpecError, VersionError, listed
from flyweight.events import emit
from flyweight.formats.legacy import SHARED_DIRECTORY
from flyweight.formats.snapshot import number_in
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.spec.model_layout import ModelLayout
from flyweight.stores.local import as_path
from flyweight.stores.private_file import read_token
from flyweight.transports.address import TcpAddress, parse_address
from flyweight.transports.tls import Tls
from flyweight.verbs.find import PathLike

STRATEGIES: Mapping[str, Collection[str]] = {
    "ipc_snapshot": ("files", "old files"),
    "ipc": ("publisher",),
    "ipc_async": ("publisher",),
    "rsync": ("publisher", "files"),
}
"""The sources of each strategy, nearest first. Old files are those of FastDeploy's trainers."""
_TLS_OPTIONS = ("tls_certificate", "tls_key", "tls_authority")
_RSYNC_OPTIONS = ("address", "token", "token_file", *_TLS_OPTIONS, "store", "timeout_seconds")
_MAX_YAML_BYTES = 1 << 16
_log = getLogger("flyweight.fastdeploy")


@dataclass(frozen=True, kw_only=True)
class FastDeployOptions:
    """Options that the old config has no place for: `config.flyweight`, a dict or an object."""

    address: str | None = None
    """Where the trainer publishes, 'unix:DIRECTORY' or 'tcp://HOST:PORT'; 'ipc' and 'ipc_async'
    need it."""
    token: str | None = None
    """The publisher's token; one at a tcp address always has one."""
    token_file: PathLike | None = None
    """A file that holds the token, and that only this user can read, in place of `token`."""
    tls_authority: PathLike | None = None
    """The file with the authority that signs the certificate of a publisher that uses TLS."""
    tls_certificate: PathLike | None = None
    """The file with this engine's certificate, if the publisher demands one."""
    tls_key: PathLike | None = None
    """The file with the private key of that certificate."""
    store: PathLike | None = None
    """The directory of snapshots for 'rsync'; by default the model's directory."""
    shared_directory: PathLike = SHARED_DIRECTORY
    """The last place where 'ipc_snapshot' looks for old files."""
    cell: PathLike | None = None
    """The path of a status cell, through which a control server sees and drives this engine."""
    layout: ModelLayout | None = None
    """Which of the trainer's tensors this engine's tensors hold, and under which names."""
    strict: bool = False
    """Whether a source with tensors that the models lack is refused; else they are reported."""
    load_weights: bool = True
    """Whether models that have a `load_weights` load by it; False: they are filled by name."""
    partial_over: int | None = None
    """The version that the models already hold of parameters that files lack; None: no file may
    lack a parameter."""
    staging_bytes: int | None = None
    """The most host memory for a version that arrives before the pause, as all of it does from
    another host; by default half of what is free."""
    timeout_seconds: float = 60.0
    """How long to wait for a version, and for the other ranks."""

    def __post_init__(self) -> None:
        check_seconds("timeout_seconds", self.timeout_seconds)
        if type(self.strict) is not bool:
            raise SpecError(f"strict is {self.strict!r}, not True or False")
        if self.token is not None and self.token_file is not None:
            raise SpecError("token and token_file are both given; give one of them")

    @classmethod
    def of(cls, config: object) -> FastDeployOptions:
        """Return the options in `config.flyweight`; raise SpecError for an unknown one."""
        given = getattr(config, "flyweight", None)
        if isinstance(given, cls):
            return given
        known = [each.name for each in fields(cls)]
        if given is None or isinstance(given, Mapping):
            options = dict(given or {})
        else:
            names = (*known, *getattr(given, "__dict__", ()))
            public = [name for name in names if not name.startswith("_") and hasattr(given, name)]
            options = {name: getattr(given, name) for name in public}
        if unknown := [str(each) for each in options if each not in known]:
            raise SpecError(
                f"config.flyweight has {listed(unknown)}; it may have {', '.join(known)}"
            )
        return cls(**options)

    def with_rsync(self, config: object) -> FastDeployOptions:
        """Return these options, overridden by the old `load_config.rsync_config`.

        Other keys of it are for FastDeploy's own network transport: they are logged and ignored.
        """
        given = getattr(read(config, "load_config"), "rsync_config", None)
        if given is None:
            return self
        if not isinstance(given, Mapping):
            raise SpecError(f"load_config.rsync_config is a {type(given).__name__}, not a dict")
        if unknown := [str(each) for each in given if each not in _RSYNC_OPTIONS]:
            names = listed(unknown)
            _log.warning("load_config.rsync_config has %s, which are ignored", names)
            emit("config.ignored", where="load_config.rsync_config", names=names)
        return replace(self, **{name: given[name] for name in _RSYNC_OPTIONS if name in given})

    def secret(self) -> str | None:
        """Return the publisher's token, from its file if there is one; None if none was given."""
        if self.token_file is not None:
            found = read_token(as_path(self.token_file))
            if found is None:
                raise PeerRefused(f"there is no token file {str(self.token_file)!r}")
            return found
        if self.token is None and isinstance(parse_address(str(self.address)), TcpAddress):
            raise SpecError(
                f"a publisher at {self.address} has a token; set token_file, or token, beside the "
                f"address"
            )
        return self.token

    def tls(self) -> Tls | None:
        """Return the certificates for a publisher that uses TLS, if any were given."""
        given = {name.removeprefix("tls_"): getattr(self, name) for name in _TLS_OPTIONS}
        return Tls(**given) if any(each is not None for each in given.values()) else None


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the config and the environment say about this rank of the engine."""

    strategy: str
    options: FastDeployOptions
    directory: str
    """The model's directory."""
    rank: int
    """This rank among those of tensor parallelism, which is its rank in the layout."""
    global_rank: int
    num_global_ranks: int
    gpu_id: int | str
    """The physical GPU's number or UUID, which is part of the old file names."""
    has_experts: bool
    """Whether expert parallelism is on."""
    group: object
    """The process group whose ranks must serve one version together; None: Paddle's default."""
    num_ranks: int
    """The number of ranks in that group."""

    @classmethod
    def of(cls, config: object, options: FastDeployOptions | None) -> Deployment:
        """Read the config; a strategy that does not exist is refused before anything else."""
        strategy = check_strategy(read(config, "load_config.load_strategy"))
        parallel: Any = read(config, "parallel_config")
        options = FastDeployOptions.of(config) if options is None else options
        distributed = sys.modules["paddle.distributed"]
        num_global_ranks: int = distributed.get_world_size()
        has_experts = bool(getattr(parallel, "enable_expert_parallel", False))
        size = "parallel_config.tensor_parallel_size"
        return cls(
            strategy=strategy,
            options=options.with_rsync(config) if strategy == "rsync" else options,
            directory=str(read(config, "model_config.model")),
            rank=_read_number(config, "parallel_config.tensor_parallel_rank"),
            global_rank=distributed.get_rank(),
            num_global_ranks=num_global_ranks,
            gpu_id=_gpu_id(),
            has_experts=has_experts,
            group=getattr(parallel, "ep_group" if has_experts else "tp_group", None),
            num_ranks=num_global_ranks if has_experts else _read_number(config, size),
        )

    def rendezvous(self) -> Rendezvous:
        """Return where this rank finds the other ranks of the group."""
        rendezvous = Rendezvous() if self.num_ranks == 1 else rendezvous_of(self.group)
        if self.num_ranks != 1 and rendezvous.num_ranks == 1:
            raise SpecError(
                f"the config has {self.num_ranks} ranks, paddle.distributed has one; call "
                f"paddle.distributed.init_parallel_env first"
            )
        return rendezvous


def check_strategy(name: object) -> str:
    """Return the name of a strategy that exists."""
    if not isinstance(name, str) or name not in STRATEGIES:
        raise SpecError(f"load_strategy is {name!r}, not one of {', '.join(STRATEGIES)}")
    return name


def read(config: object, path: str) -> object:
    """Return the value under dotted names; raise SpecError that names what is missing."""
    value = config
    for name in path.split("."):
        if not hasattr(value, name):
            raise SpecError(f"the config has no {path!r}: its {type(value).__name__} lacks {name}")
        value = getattr(value, name)
    return value


def _read_number(config: object, path: str) -> int:
    found = read(config, path)
    if type(found) is not int or found < 0:
        raise SpecError(f"{path} is {found!r}, expected a whole number")
    return found


def _gpu_id() -> int | str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    selected = os.environ.get("FLAGS_selected_gpus") or "0"  # noqa: SIM112 - its name
    devices = [each.strip() for each in visible.split(",")]
    if not selected.isdigit() or int(selected) >= len(devices):
        raise SpecError(
            f"FLAGS_selected_gpus is {selected!r}, CUDA_VISIBLE_DEVICES {visible!r} has "
            f"{len(devices)} devices"
        )
    found = devices[int(selected)]
    return int(found) if found.isdigit() else found


def version_number(text: str) -> int:
    """Return the number that a version's text ends with."""
    number = number_in(text)
    if number is None:
        raise VersionError(
            f"version is {text!r}, expected a whole number, or text that ends with one"
        )
    return check_version(number)


def read_step(directory: str) -> str:
    """Return the `step` of a directory's version.yaml as text; raise VersionError."""
    file = str(Path(directory) / "version.yaml")
    try:
        return _step_in(file)
    except VersionError as error:
        error.note(f"write 'step: NUMBER' to {file!r}, or pass version=")
        raise


def _step_in(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_YAML_BYTES + 1)
    except OSError as cause:
        raise VersionError(
            f"no version was given, and {file!r} cannot be read: {cause.strerror}"
        ) from cause
    if len(data) > _MAX_YAML_BYTES:
        raise VersionError(f"{file!r} has more than {_MAX_YAML_BYTES} bytes")
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as cause:
        raise MissingDependency(
            f"{file!r} is read by PyYAML; pip install 'flyweight[fastdeploy]', or pass version="
        ) from cause
    try:
        root, found = yaml.compose(data, yaml.SafeLoader), yaml.safe_load(data)
    except Exception as cause:  # PyYAML also raises others, such as KeyError for "!!bool 7"
        raise VersionError(f"{file!r} is no YAML: {type(cause).__name__}: {cause}") from cause
    pairs = root.value if isinstance(found, dict) else []
    nodes = [node for key, node in pairs if key.value == "step"]
    if len(nodes) != 1:  # PyYAML would take the last of two
        raise VersionError(
            f"{file!r} holds a {type(found).__name__} with {len(nodes)} values for 'step', "
            f"expected a mapping with one"
        )
    step, written = found["step"], nodes[0].value
    is_readable = type(step) is str
    if type(step) is int:  # YAML reads 0017 as 15 and 1:30 as 90
        is_readable = written.removeprefix("+").isdecimal() and int(written) == step
    if not is_readable or number_in(str(step)) is None:
        shown = written if isinstance(written, str) else step
        raise VersionError(
            f"step is {shown!r:.80} in {file!r}, a YAML {type(step).__name__}; expected a decimal "
            f"number, or text that ends with one"
        )
    return str(step)
