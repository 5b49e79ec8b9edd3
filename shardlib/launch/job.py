"""A job: one program to run on many hosts, whoever starts it, and variables that look like secrets.

The program is the same on every process (JAX's multi-controller runtime); the topology says how
many hosts and devices there are. Engines turn a job into what their scheduler reads.

>>> Job(name="llama", command=("train", "--run", "/runs/llama"), topology="16*h100:8").hosts
16
>>> Job(name="llama", command=("train", "--run", "/runs/llama"), topology="v5p:8x8x8").hosts
128

Engines write the variables of a job into files, where a secret must not be.

Names are read by their words: `OPENAI_KEY`, `MYPASS` and `apiToken` hold secrets, `SORT_KEY`,
`KEYBOARD`, `TOKENIZERS_PARALLELISM`, `SSH_AUTH_SOCK` and `HF_TOKEN_PATH` do not. Whoever knows
better says so (`Job.plain`).

>>> [name for name in ("OPENAI_KEY", "MYPASS", "AUTH", "apiToken") if not secret_name(name)]
[]
>>> names = ("KEYBOARD", "JAX_COMPILATION_CACHE_KEY_TYPE", "BYPASS", "PWD")
>>> [name for name in names if secret_name(name)]
[]
>>> secret_value("Bearer abc.def"), secret_value("--xla_gpu_autotune_level=0")
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.errors import LaunchError, raise_all
from shardlib.machines.topology import Topology, topology
from shardlib.untrusted.data import shown

#: Words of names that stand for a secret wherever they stand.
WORDS = re.compile(
    "AUTH|AUTHORIZATION|BEARER|COOKIES?|CREDS?|CREDENTIALS?|JWT|PASS|PASSPHRASE|PASSWD|PASSWORD|PAT"
    "|PWD|SECRETS?|TOKEN"
)
#: What a word that stands for a secret may end with, where it is written together with others:
#: HFTOKEN, PGPASSWORD, MYPASS, APIKEY, OAUTH.
ENDINGS = re.compile(
    "(APIKEY|AUTH|COOKIE|CREDENTIALS|PASS|PASSPHRASE|PASSWD|PASSWORD|PWD|SECRET|SSHKEY|TOKEN)$"
)
#: Words with such an ending that are none.
ORDINARY = frozenset({"BYPASS", "COMPASS", "OLDPWD", "UNDERPASS", "MULTIPASS"})
#: What a key is for that is a secret wherever it stands in a name.
KEYS = re.compile("ACCESS|ACCOUNT|API|DEPLOY|ENCRYPTION|LICENSE|MASTER|PRIVATE|SERVICE|SIGNING|SSH")
#: What a key at the end of a name is for that is none.
PLAIN_KEYS = re.compile(
    "CACHE|FOREIGN|GROUP|HOT|INDEX|PARTITION|PRIMARY|PUBLIC|REGISTRY|ROUTING|SHARD|SORT"
)
#: Last words of names that say something about a secret, and not the secret.
ABOUT = re.compile(
    "COUNT|DIR|ENABLED|FILE|FOLDER|HOST|LENGTH|METHOD|MODE|NAME|PATH|PORT|PROVIDER|SECONDS|SIZE"
    "|SOCK|TIMEOUT|TTL|TYPE"
)
#: Values that are none, whatever their variable is called: switches.
SWITCHES = frozenset({"", "0", "1", "false", "no", "off", "on", "true", "yes"})
#: Names of every shell.
SHELL = frozenset({"PWD", "OLDPWD"})
#: Values that are secrets whatever their variable is called: a password in an address, a private
#: key, tokens of well-known services, of AWS and Google, signed tokens, headers that let somebody
#: in.
VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY|"
    r"\b(hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abprs]-)[\w-]{16,}|"
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{10,}\.eyJ[\w-]+\.|"
    r"^\s*(?i:Authorization:\s*)?"
    r"((?i:Bearer)\s+[\w.~+/=-]+|(?i:Basic)\s+[A-Za-z0-9+/]{4,}=+)\s*$"
)


def secret_name(name: str) -> bool:
    """Returns whether a name is one of a variable that holds a secret."""
    words = [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or name in SHELL or ABOUT.fullmatch(words[-1]):
        return False
    if any(
        WORDS.fullmatch(word) or (ENDINGS.search(word) and word not in ORDINARY) for word in words
    ):
        return True
    before = ["", *words]
    return any(
        word in ("KEY", "KEYS")
        and (KEYS.fullmatch(first) or (number == len(words) and not PLAIN_KEYS.fullmatch(first)))
        for number, (first, word) in enumerate(zip(before, words, strict=False), 1)
    )


def secret_value(value: str) -> bool:
    """Returns whether a value is a secret by itself."""
    return VALUE.search(value) is not None


def likely_secret(name: str, value: str) -> str:
    """Describes the part of a variable that looks like a secret, as the beginning of a message that
    does not show it; empty where nothing does.
    """
    if secret_name(name) and value.strip().lower() not in SWITCHES:
        return f"environment has {name}, which looks like a secret"
    return f"the value of {name} in environment looks like a secret" if secret_value(value) else ""


def too_small(value: object, **least: int) -> list[str]:
    """Lists the fields of a value that are below their least; None is none of them."""
    return [
        f"{name} is {number}; it must be at least {minimum}"
        for name, minimum in least.items()
        if (number := getattr(value, name)) is not None and number < minimum
    ]


#: Names that every engine accepts: labels of DNS (RFC 1123), short enough for what Kubernetes
#: appends.
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
#: Images of registries, and files of images, with no signs that a shell or a list of options
#: divides at.
IMAGE = re.compile(r"[A-Za-z0-9/._~][^\s\"'\\`$;&|<>,]*")

#: Commands of `shardlib` that make sense on every process of a cluster.
COMMANDS = ("train", "doctor", "measure")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program on every process of a cluster.

    Attributes:
        name: of the job; lower-case letters, digits and "-".
        command: words of a `shardlib` command ("train", "--run", ...), or of any other program
            where the first word is not one ("python", "train.py").
        topology: machine, as `shardlib.plan` spells it, or a `.toml` file; TPU slices joined by
            "N*" are a multislice.
        host_devices: JAX devices of a host; by default what the kind of chip is sold with.
        host_processes: processes on a host, which share its devices evenly.
        image: container image; None for the environment that the host has.
        environment: variables of every process. Secrets are not accepted: engines write these into
            files. What looks like one by name or value is refused.
        plain: names of variables in `environment` that look like secrets and are none.
        run: folder of the run, seen by all hosts; None where nothing is kept.
        restarts: how often the job starts again without progress, before it ends.
        seconds: time limit of one start; None for that of the engine.

    Raises:
        LaunchError: fields that no engine could use, all of them listed.
        TopologyError: the topology does not parse.
    """

    name: str
    command: tuple[str, ...]
    topology: str
    host_devices: int | None = None
    host_processes: int = 1
    image: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    plain: tuple[str, ...] = ()
    run: str | None = None
    restarts: int = 3
    seconds: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", tuple(self.command))
        object.__setattr__(self, "plain", tuple(self.plain))
        object.__setattr__(self, "environment", dict(sorted(self.environment.items())))
        failures = (
            []
            if NAME.fullmatch(self.name)
            else [
                f"name is {self.name!r}; it needs 1 to 40 lower-case letters, digits and '-',"
                " beginning with a letter"
            ]
        )
        if not self.command:
            failures.append(
                "command is empty; after -- stands what to run, e.g. -- train --run runs/first"
            )
        failures += [
            f"{what}, and files would show it; let the engine's own store of secrets set it, or say"
            f" that it is none: --plain {name}, or Job(plain=...)"
            for name, value in self.environment.items()
            if name not in self.plain and (what := likely_secret(name, value))
        ]
        failures += [
            f"plain has {shown(name)}, which is not a variable of environment"
            for name in self.plain
            if name not in self.environment
        ]
        texts = (
            [("command", word) for word in self.command]
            + [("run", self.run or ""), ("image", self.image or "")]
            + [(f"environment {name}", value) for name, value in self.environment.items()]
        )
        failures += [
            f"{what} is {shown(text)}, which no process can be given"
            for what, text in texts
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text)
        ]
        if self.image is not None and not IMAGE.fullmatch(self.image):
            failures.append(f"image is {shown(self.image)}, which is not an image")
        failures += [
            f"environment has {name!r}, which is not a name of a variable"
            for name in self.environment
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        ]
        failures += too_small(self, host_processes=1, restarts=0, seconds=1, host_devices=1)
        if not failures:
            failures += self._uneven()
        if failures:
            raise_all(LaunchError, f"the job {self.name!r} cannot be launched", failures)

    def _uneven(self) -> list[str]:
        devices, per_host = self.machine.devices, self.devices_per_host
        if devices % per_host:
            return [
                f"{self.topology} has {devices} devices, which are not whole hosts of {per_host}"
            ]
        if per_host % self.host_processes:
            return [
                f"the {per_host} devices of a host cannot be shared evenly by {self.host_processes}"
                " processes"
            ]
        return []

    @property
    def machine(self) -> Topology:
        """The topology, parsed."""
        return topology(self.topology)

    @property
    def devices_per_host(self) -> int:
        """JAX devices of a host."""
        return self.host_devices or devices_per_host(self.machine)

    @property
    def hosts(self) -> int:
        """Number of machines."""
        return self.machine.devices // self.devices_per_host

    @property
    def slices(self) -> int:
        """TPU slices, joined by the data-centre network; 1 for GPUs."""
        outer = self.machine.tiers[0]
        return (
            outer.devices if self.machine.chip.vendor == "google" and outer.kind == "network" else 1
        )

    @property
    def processes(self) -> int:
        """Number of processes on all hosts."""
        return self.hosts * self.host_processes

    @property
    def words(self) -> tuple[str, ...]:
        """The command of every process, whole."""
        return (
            ("python", "-m", "shardlib", *self.command)
            if self.command[0] in COMMANDS
            else self.command
        )


# --------------------------------------------------------------------------------------------------
# Devices per host, as clouds and vendors offer machines.

#: Chips per TPU host, for generations whose slices span several hosts
#: [https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, read 2026-11].
TPU_HOST_CHIPS = 4
#: GPUs per host, if not 8 [nvidia GB200 NVL72: 18 trays of 4].
GPUS_PER_HOST: Mapping[str, int] = {"gb200": 4}
#: Generations with slices of eight chips on one host [docs.cloud.google.com/tpu/docs/{v5e,v6e}:
#: ct5lp-hightpu-8t, ct6e-standard-8t].
TPU_EIGHT = ("v5e", "v6e")


def devices_per_host(machine: Topology) -> int:
    """JAX devices per host, by the kind of chip."""
    chip = machine.chip
    domain = machine.devices // (
        machine.tiers[0].devices if machine.tiers[0].kind == "network" else 1
    )
    if chip.vendor == "google":
        chips = domain // chip.devices_per_chip
        return (
            chips
            if chips <= TPU_HOST_CHIPS or (chips == 8 and chip.name in TPU_EIGHT)
            else TPU_HOST_CHIPS
        ) * chip.devices_per_chip
    return min(domain, GPUS_PER_HOST.get(chip.name, 8)) if chip.vendor != "cpu" else domain
