"""Variables that look as if they held a secret. Engines write the variables of a job into files,
where a secret must not be.

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

#: Words of names that stand for a secret wherever they stand.
WORDS = frozenset(
    {
        "AUTH",
        "AUTHORIZATION",
        "BEARER",
        "COOKIE",
        "COOKIES",
        "CRED",
        "CREDS",
        "CREDENTIAL",
        "CREDENTIALS",
        "JWT",
        "PASS",
        "PASSPHRASE",
        "PASSWD",
        "PASSWORD",
        "PAT",
        "PWD",
        "SECRET",
        "SECRETS",
        "TOKEN",
    }
)
#: What a word that stands for a secret may end with, where it is written together with others:
#: HFTOKEN, PGPASSWORD, MYPASS, APIKEY, OAUTH.
ENDINGS = (
    "APIKEY",
    "AUTH",
    "COOKIE",
    "CREDENTIALS",
    "PASS",
    "PASSPHRASE",
    "PASSWD",
    "PASSWORD",
    "PWD",
    "SECRET",
    "SSHKEY",
    "TOKEN",
)
#: Words with such an ending that are none.
ORDINARY = frozenset({"BYPASS", "COMPASS", "OLDPWD", "UNDERPASS", "MULTIPASS"})
#: What a key is for that is a secret wherever it stands in a name.
KEYS = frozenset(
    {
        "ACCESS",
        "ACCOUNT",
        "API",
        "DEPLOY",
        "ENCRYPTION",
        "LICENSE",
        "MASTER",
        "PRIVATE",
        "SERVICE",
        "SIGNING",
        "SSH",
    }
)
#: What a key at the end of a name is for that is none.
PLAIN_KEYS = frozenset(
    {
        "CACHE",
        "FOREIGN",
        "GROUP",
        "HOT",
        "INDEX",
        "PARTITION",
        "PRIMARY",
        "PUBLIC",
        "REGISTRY",
        "ROUTING",
        "SHARD",
        "SORT",
    }
)
#: Last words of names that say something about a secret, and not the secret.
ABOUT = frozenset(
    {
        "COUNT",
        "DIR",
        "ENABLED",
        "FILE",
        "FOLDER",
        "HOST",
        "LENGTH",
        "METHOD",
        "MODE",
        "NAME",
        "PATH",
        "PORT",
        "PROVIDER",
        "SECONDS",
        "SIZE",
        "SOCK",
        "TIMEOUT",
        "TTL",
        "TYPE",
    }
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
    """Whether a name is one of a variable that holds a secret."""
    words = [word.upper() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or name in SHELL or words[-1] in ABOUT:
        return False
    if any(word in WORDS or (word.endswith(ENDINGS) and word not in ORDINARY) for word in words):
        return True
    before = ["", *words]
    return any(
        word in ("KEY", "KEYS")
        and (first in KEYS or (number == len(words) and first not in PLAIN_KEYS))
        for number, (first, word) in enumerate(zip(before, words, strict=False), 1)
    )


def secret_value(value: str) -> bool:
    """Whether a value is a secret by itself."""
    return VALUE.search(value) is not None


def likely_secret(name: str, value: str) -> str:
    """What of a variable looks like a secret, as the beginning of a message that does not show it;
    nothing where nothing does.
    """
    if secret_name(name) and value.strip().lower() not in SWITCHES:
        return f"environment has {name}, which looks like a secret"
    return f"the value of {name} in environment looks like a secret" if secret_value(value) else ""
