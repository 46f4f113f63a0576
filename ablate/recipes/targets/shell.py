"""Reader of shell scripts: the arguments and the environment that the job gets which a script starts.

A script is read as bash runs it, in straight lines: assignments, `export`, arrays, `$NAME`,
`${NAME:-default}`, `source`, and one command that starts the job, perhaps by `env`, `srun`, `docker run` or
`ray job submit`. By `--export` at its head, sbatch chooses the variables that it gets, and srun those that it
hands on (`SLURM_EXPORT_ENV`). Everything else is passed over: branches, loops, functions, subshells, files
that are written. What is passed over is refused if it names a variable or an option about precision, or
starts a job, and what it may assign is not known from there on. A value that is not known, such as
`$(hostname)`, is refused where it decides about the precision.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, NoReturn

from ablate.errors import InputError
from ablate.files import user_path
from ablate.recipes.targets.megatron import PRECISION, VALUED

_NEST = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"
_INNER = rf"\${_NEST}|\$\[[^]]*\]|`[^`]*`|\$\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|\$[A-Za-z_]\w*|\$[\d@*#?!$-]"
_EXPANSION = rf"\$'(?:\\.|[^'\\])*'|\$(?=\")|[<>]{_NEST}|{_INNER}"
_DOUBLE = rf'"(?:\\.|{_INNER}|\$(?![([{{\w@*#?!$-])|[^"\\$`])*+"'
_WORD = rf"(?:'[^']*'|{_DOUBLE}|\\.|{_EXPANSION}|\$(?![([{{'\"])|[^\s\\'\"$`;&|<>()])++"
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+|\\\n)|(?P<comment>#[^\n]*)|(?P<operator>;;&?|;&|&&|\|\||\|&|[;|()\n]|&(?!>))"
    rf"|(?P<redirection>\d*(?:<<<|&>>?|[<>]&|>>|>\||<>|[<>](?!\())[ \t]*{_WORD})"
    rf"|(?P<word>[A-Za-z_]\w*\+?=\((?:\s|\\\n|#[^\n]*|{_WORD})*+\)|{_WORD})|(?P<open>.)",
    re.DOTALL,
)
_PART = re.compile(rf"'[^']*'|(?P<double>{_DOUBLE})|\\.|(?P<expansion>{_EXPANSION})", re.DOTALL)
_QUOTED_PART = re.compile(rf"\\(?P<escaped>[$`])|\\.|(?P<expansion>{_INNER})", re.DOTALL)
_PARAMETER = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(\[[@*]\])?(?:(:?)-(.*))?\})", re.DOTALL)
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]*['\"\\]?(\w+)['\"]?([^\n]*\n)((?:.*\n)*?)\t*\1$", re.MULTILINE)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:(\+?)=(.*))?", re.DOTALL)
_NAMED = re.compile(r"(?:^|\$\{)([A-Za-z_]\w*)(?=$|\+?=|\[|:?=)")
"""Name that a word may give a value to."""
_CLOSING = {"if": "fi", "case": "esac", "(": ")", "{": "}", "[[": "]]"}
_CLOSING |= dict.fromkeys(("for", "while", "until", "select"), "done")
_LEADING = ("then", "do", "else", "elif", "if", "while", "until", "!", "time")
"""Words after which a command begins."""
_HARMLESS = re.compile(
    r"echo|cd|mkdir|ls|cat|tee|pwd|date|sleep|true|wait|module|ulimit|\[|test|grep|rm|cp|shift"
)
"""Commands that start no job and change no variable, whatever their words are."""
_WRITING = ("cp", "tee")
"""Those of them that write files which their words name."""
_MAY_FAIL = "cd &&"
_AND = {"export": ";", "cd": _MAY_FAIL, "mkdir": _MAY_FAIL, "module": _MAY_FAIL, "source": _MAY_FAIL}
"""Meaning of `&&` by the command before it: `export` succeeds; if others fail, no job of the line runs."""
_CHANGING = ("export", "declare", "typeset", "unset", "set", "source", ".", "exit", "return", "cd")
_LAUNCHER = re.compile(r"torchrun|python[\d.]*|.*\.py")
_STARTING = re.compile(
    rf"{_LAUNCHER.pattern}|accelerate|deepspeed|numactl|nohup|exec|nsys|-.*|time|nice|timeout|stdbuf|uv|conda"
)
"""Programs that hand their arguments and environment on; an option begins a text of arguments alone."""
_APART = {"docker": ("run", "exec"), "podman": ("run", "exec"), "ray": ("job",)}
"""Programs that give the job the environment of their options alone, with their commands that do."""
_CARRIERS = ("env", "srun", *_APART)
"""Programs before the job's whose options are read."""
_DIRECTIVES = ("#SBATCH", "#PBS", "#BSUB", "#$ ", "#flux:", "#PJM")
"""Beginnings of the comments that schedulers read."""
_OF_FILES = ("--env-file", "--env-host", "--export-file", "--runtime-env", "--task-prolog")
"""Options of programs before the job's that give it variables which no word says."""
_ELSEWHERE = re.compile(r"singularity|apptainer|enroot|kubectl|ssh|mpirun|mpiexec|sudo|(ba)?sh")
"""Words before the job's program that give it another environment, or other arguments."""
_JOB = re.compile(r"(?:.*/)?(?:torchrun|pretrain\w*\.py)|torch\.distributed\.(?:run|launch)")
_ACTIVATION = re.compile(r".*(?:/activate|conda\.sh|/profile|\.bashrc|/modules?\.sh|/init/bash)")
"""Files that are sourced for the paths of programs."""
_OTHER_SCRIPT = re.compile(r"(?:.*/)?(?:(?:ba|z|k)?sh|sbatch|.*\.sh)")
_HOOK = re.compile(r"conda|mamba|ssh-agent|pyenv|spack|direnv|modulecmd")
"""Programs that print what activates an environment."""
_OWN_FOLDER = re.compile(
    r'\$\((?:cd (?:-- )?"?\$\()?dirname (?:-- )?"?\$(?:0|\{BASH_SOURCE(?:\[0\])?\}|BASH_SOURCE)"?'
    r'(?:\)"? (?:> ?/dev/null )?&& pwd(?: -P)?)?\)'
)
"""Expansion that has the folder of the script."""
_HIDDEN = re.compile("[\0\1]")
"""Characters for a value that is not known, and for what a program prints."""
_UNCLEAR = re.compile(r"[\0\1*{]")
"""The same, the star by which podman hands on all variables whose names begin alike, and bash's braces."""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


class Started(NamedTuple):
    """Command that starts a job, with its environment and its line."""

    words: list[str]
    environment: dict[str, str]
    line: int = 0


class Script:
    """Variables and jobs of a script, read from the environment before it on; InputError if something about
    precision is not understood. The path is for messages and for what it sources. `exporting`: each
    assignment is exported, as after `set -a`.
    """

    def __init__(self, path: Path, text: str, before: Mapping[str, str], exporting: bool = False) -> None:
        self._path, self._exporting = path, exporting
        self._variables = {name: [value] for name, value in before.items()}
        self._exported, self._clouded, self._sourced = set(before), dict[str, str](), set[Path]()
        self._written = set[str]()
        self._ended, self._folder = False, path.parent if str(path) else None
        self._jobs, self._programs, self._others = list[Started](), list[int](), list[int]()
        self._submit(text, before)
        self._run(text)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a command would get after the script."""
        return {name: items[0] for name, items in self._variables.items() if items and name in self._exported}

    def job(self) -> Started:
        """Return the one job; of a text that starts none, all arguments that it has or assigns."""
        if len(self._jobs) > 1 and any(job.words[0][0] != "-" for job in self._jobs):
            lines = " and ".join(str(job.line) for job in self._jobs)
            self._refuse(f"more than one command has arguments of a job (lines {lines})", self._jobs[1].line)
        if self._jobs and self._jobs[0].words[0][0] != "-":
            return self._jobs[0]
        words = [word for job in self._jobs for word in job.words]
        own = [" ".join(self._variables[name]) for name in self._variables.keys() - self._exported]
        given = [] if words else [text for text in own if PRECISION.search(text)]
        if given and self._programs:
            self._refuse(f"no command gets {given[0]}", self._programs[0])
        if self._others and not (words or given):
            self._refuse("another script is started here, which may start the job", self._others[0])
        if not (words or given or self._programs):
            self._refuse("no command has the arguments of a job", 1)
        return Started(words or self._checked(" ".join(given).split(), -1, 1), self.environment)

    def _refuse(self, why: str, line: int) -> NoReturn:
        way_on = "give the arguments that the job gets by --megatron-args, and its variables by --env"
        raise InputError(f"{self._path}:{line}: {_HIDDEN.sub('?', why)}; {way_on}")

    def _submit(self, text: str, before: Mapping[str, str]) -> None:
        """Give the script the environment that sbatch does by the options at its head."""
        head = takewhile(lambda line: line.lstrip()[:1] in ("", "#"), text.splitlines())
        names: str | None = None
        for number, line in enumerate(head, 1):
            if not line.startswith("#SBATCH"):
                continue
            words = iter(line.partition(" #")[0].split())
            for word in words:
                option, equals, value = word.partition("=")
                if option in _OF_FILES:
                    self._refuse(f"{word}: it gives the job variables that are not read here", number)
                if option == "--export":
                    names = (value if equals else next(words, "")).strip("\"'")
            names = before.get("SBATCH_EXPORT", names)
        if names is not None:
            given = self._by_slurm(names, before) | {"SLURM_EXPORT_ENV": names}
            self._variables, self._exported = {name: [value] for name, value in given.items()}, {*given}

    def _run(self, text: str) -> None:
        """Read the commands of a text one after another."""
        if "\r\n" in text and text.startswith("#!"):
            self._refuse("the line ends are those of Windows, which bash hands to the job", 1)
        text = _HEREDOC.sub(self._without_body, text.replace("\r\n", "\n")) + "\n"
        stack, region, command = list[str](), list[_Token](), list[_Token]()
        start, before = True, ""
        for match in _TOKEN.finditer(text):
            token = _Token(str(match.lastgroup), match[0], 1 + text.count("\n", 0, match.start()))
            inside, operator = bool(stack), token.kind == "operator"
            if token.kind == "open":
                self._refuse("a quote or a bracket is not closed", token.line)
            if token.kind in ("blank", "comment"):
                if token.text.startswith(_DIRECTIVES):
                    self._pass_over([token], "is an option of the scheduler")
                continue
            if token.text in _CLOSING and (start or operator or token.text == "{"):
                stack.append(_CLOSING[token.text])
            elif inside and token.text == stack[-1] and (start or operator or token.text == "]]"):
                stack.pop()
            if inside or stack:
                region.append(token)
                if not stack:
                    self._pass_over(region, f"stands in a branch, loop or function (line {region[0].line})")
                    region = []
            elif not operator:
                command.append(token)
            else:
                if command:
                    self._execute(command, before + token.text)
                if token.text == "&&" and command and before not in ("&&", _MAY_FAIL):
                    before = _AND.get(command[0].text, "&&")
                else:
                    conditional = token.text in ("&&", "||") or before + token.text == "&&|"
                    before = "&&" if conditional else token.text
                command = []
            start = operator or (start and token.text in _LEADING)
        if stack:
            self._refuse(f"{stack[-1]} is missing", region[0].line)

    def _without_body(self, match: re.Match[str]) -> str:
        """Return the command of a here-document, and empty lines for its body."""
        line = match.string.count("\n", 0, match.start(3)) + 1
        self._pass_over([_Token("body", match[3], line)], "stands in a text that the script writes")
        return match[2] + "\n" * match[3].count("\n")

    def _execute(self, command: Sequence[_Token], around: str) -> None:
        """Read one command between two operators."""
        words = [token for token in command if token.kind == "word"]
        written = any(">" in token.text and "&" not in token.text for token in command if token not in words)
        prefix = [*takewhile(lambda token: re.match(r"[A-Za-z_]\w*\+?=", token.text), words)]
        rest = words[len(prefix) :]
        name = rest[0].text if rest else ""
        if self._ended:
            self._refuse("a command stands after exit", command[0].line)
        changing = not rest or name in _CHANGING
        if written or name in _WRITING or not (changing or _HARMLESS.fullmatch(name)):
            self._written |= {Path(word).name for token in command for word in self._words(token)}
        apart = re.search(r"\||[^&]&$|^&$", around) or around.startswith(_MAY_FAIL) or (rest and prefix)
        if around.startswith("&&") or (changing and apart):
            self._pass_over([*prefix, *rest], "follows a condition, or is set in a shell of its own")
        elif not rest:
            for token in prefix:
                self._set(*self._assigned(token), self._exporting)
        elif changing:
            self._change(name, rest)
        elif written or around.endswith("|") or not _HARMLESS.fullmatch(name):
            self._start(prefix, rest)

    def _pass_over(self, skipped: Sequence[_Token], why: str) -> None:
        """Refuse tokens about precision or jobs; what the others assign is not known from here on."""
        for token in skipped:
            words = self._words(token) if token.kind == "word" and "=(" not in token.text else []
            for text in (token.text, *words):
                if match := PRECISION.search(text) or _JOB.fullmatch(text) or re.match(r"-+\w*[\0\1]", text):
                    self._refuse(f"{match[0]} {why}, which is not read", token.line)
        self._refuse_unknown_names(skipped, why)
        whole = " ".join(token.text for token in skipped)
        if match := re.search(r"\bset ([-+]o allexport|[-+]\w*a\w*)", whole):
            self._refuse(f"{match[0]} {why}, which is not read", skipped[0].line)
        printed = re.search(r"\$\(|`|\b(?:read|mapfile|readarray|eval|source)\b", whole)
        for name in (name for token in skipped for name in _NAMED.findall(token.text.strip("\"'"))):
            decides = PRECISION.search(" ".join(self._variables.pop(name, ())))
            self._clouded[name] = "\1" if printed or decides else self._clouded.get(name, "\0")

    def _refuse_unknown_names(self, skipped: Sequence[_Token], why: str) -> None:
        """Refuse tokens that may set any variable: a file that is sourced, or text that becomes a command."""
        begins, words = True, [token for token in skipped if token.kind != "redirection"]
        for number, token in enumerate(words):
            name, rest = token.text, words[number + 1 :]
            target = rest[0].text if rest else ""
            sourced = name in ("source", ".") and not _ACTIVATION.fullmatch(
                " ".join(self._words(rest[0])) if rest else ""
            )
            text = " ".join(each.text for each in rest)
            made = name == "eval" and any(mark in text for mark in "$`") and not _HOOK.search(text)
            named = name in ("export", "declare", "typeset", "readonly") and re.match(r"[\"']?[$`]", target)
            if begins and (sourced or made or named):
                self._refuse(f"{name} {target} {why}, and may set any variable", token.line)
            if begins and name == "cd":
                self._folder = None
            begins = token.kind == "operator" or name in (*_LEADING, "{", "in") or (begins and "=" in name)

    def _change(self, name: str, rest: Sequence[_Token]) -> None:
        """Read a command of the shell itself."""
        texts = [token.text for token in rest[1:]]
        option = len(texts) > 1 and name in ("declare", "typeset") and texts[0] == "-x"
        plain = all(_ASSIGNED.fullmatch(text) for text in texts[option:])
        self._ended |= name in ("exit", "return")
        if name == "set" and texts in (["-a"], ["+a"]):
            self._exporting = texts == ["-a"]
        elif name in ("source", ".") and texts:
            self._source(rest[1])
        elif plain and name == "unset":
            self._variables = {key: self._variables[key] for key in self._variables if key not in texts}
            self._exported -= {*texts}
        elif plain and (name == "export" or option):
            each = [self._assigned(token) for token in rest[1 + option :]]  # bash expands all, then assigns
            for assigned in each:
                self._set(*assigned, True)
        elif name == "cd":
            word = " ".join(word for token in rest[1:] for word in self._words(token) if word != "--")
            known = self._folder is not None and word and word != "-" and not _HIDDEN.search(word)
            self._folder = self._folder / user_path(word) if self._folder and known else None
        else:
            self._pass_over(rest, f"stands after {name}")

    def _source(self, token: _Token) -> None:
        """Read a file that the script sources."""
        word = " ".join(self._words(token))
        outer, path = self._path, (self._folder or Path("\0")) / user_path(word)
        if path.name in self._written:
            self._refuse(f"{word}: an earlier command may write this file", token.line)
        if "\0" not in str(path) and path.is_file() and path not in self._sourced:
            self._sourced.add(path)
            self._path = path
            self._run(path.read_text(errors="replace"))
            self._path, self._ended = outer, False
        elif not _ACTIVATION.fullmatch(word):
            self._refuse(f"{word}: this file cannot be read here", token.line)

    def _start(self, prefix: Sequence[_Token], rest: Sequence[_Token]) -> None:
        """Read a command that may start a job."""
        given = {name: " ".join(value or ()) for name, value in map(self._assigned, prefix)}
        words, line = [word for token in rest for word in self._words(token)], rest[0].line
        matches = [PRECISION.search(word) or _JOB.fullmatch(word) for word in (*given, *words)]
        named = [match[0] for match in matches if match]
        program = Path(words[0]).name if words else ""
        if not named and not program.startswith("--"):
            if any(_OTHER_SCRIPT.fullmatch(word) for word in words):
                self._others.append(line)
            elif program == "env" or _STARTING.fullmatch(program):
                self._programs.append(line)
            self._pass_over(rest, "is not read")
            return
        words, environment = self._carried(words, self.environment | given, (named or [program])[0], line)
        program = Path(words[0]).name
        script = next((number for number, word in enumerate(words) if word.endswith(".py")), -1)
        launcher = [Path(word).name for word in words[: script if script >= 0 else len(words)]]
        other = [word for word in (program, *launcher) if _ELSEWHERE.fullmatch(word)]
        if other or not _STARTING.fullmatch(program):
            self._refuse(f"{named[0]} is handed to {(other or [program])[0]}, which is not read", line)
        self._jobs.append(Started(self._checked(words, script, line), environment, line))

    def _carried(
        self, words: list[str], environment: dict[str, str], named: str, line: int
    ) -> tuple[list[str], dict[str, str]]:
        """Return a command's words from the job's launcher on, and the environment that the programs before
        give it, of which the first gets `environment`. `named`: what it has about precision or a job.
        """
        count = next((number for number, word in enumerate(words) if _LAUNCHER.fullmatch(Path(word).name)), 0)
        carrier, whole, others, pending = "", environment, list[str](), iter(words[:count])
        if count and (first := Path(words[0]).name) not in _CARRIERS and not _STARTING.fullmatch(first):
            self._refuse(f"{named} is handed to {first}, which is not read", line)
        for word in pending:
            option, equals, value = word.partition("=")
            if (name := Path(word).name) in _CARRIERS:
                if name in _APART and (command := next(pending, "")) not in _APART[name]:
                    self._refuse(f"{named} is handed to {name} {command}, which is not read", line)
                carrier, whole = name, environment
                environment = {} if carrier in _APART else dict(environment)
                if carrier == "srun":
                    usual = whole.get("SLURM_EXPORT_ENV", "ALL")
                    environment = self._by_slurm(whole.get("SRUN_EXPORT_ENV", usual), whole)
            elif carrier == "env" and word in ("-i", "-", "--ignore-environment"):
                environment = {}
            elif carrier == "env" and word == "-u":
                environment.pop(next(pending, ""), None)
            elif carrier == "env" and equals and option.isidentifier():
                environment[option] = value
            elif carrier == "env" and word[:1] == "-" and word != "--":
                self._refuse(f"{named} is handed to env {word}, which is not read", line)
            elif carrier == "srun" and option == "--export":
                environment = self._by_slurm(value if equals else next(pending, ""), whole)
            elif carrier in ("docker", "podman") and option in ("-e", "--env"):
                environment |= self._given([value if equals else next(pending, "")], whole)
            elif carrier == "ray" and option == "--runtime-env-json":
                environment |= self._of_ray(value if equals else next(pending, ""), word, line)
            elif option in _OF_FILES:
                self._refuse(f"{word}: it gives the job variables that are not read here", line)
            elif carrier not in ("", "srun") and re.fullmatch(r"(-\w*e.*)?[\0\1]+.*", word):
                self._refuse(f"{word} of {carrier}: the script does not say the value", line)
            else:
                others.append(word)
                carrier = "" if carrier == "env" and word != "--" else carrier  # its program has begun
        for name, value in environment.items():
            if _UNCLEAR.search(name) or (name.startswith("NVTE_") and _UNCLEAR.search(value)):
                self._refuse(f"{name}={value} of {carrier}: the script does not say the value", line)
        for word in others:
            if (match := PRECISION.search(word)) or _ELSEWHERE.fullmatch(Path(word).name):
                self._refuse(
                    f"{match[0] if match else named} is handed to {carrier or word}, which is not read", line
                )
        return words[count:], environment

    def _of_ray(self, text: str, word: str, line: int) -> dict[str, str]:
        """Return the variables of a job's environment as Ray has it; refuse one that is not of this form."""
        try:
            data = json.loads(text, strict=False)
            variables: dict[str, str] = data.pop("env_vars", {})
            if not all(isinstance(value, str) for value in variables.values()) or PRECISION.search(str(data)):
                raise ValueError
        except (ValueError, AttributeError, TypeError, RecursionError):
            self._refuse(f"{word}: the script does not say this JSON", line)
        return variables

    def _by_slurm(self, text: str, whole: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that `--export` of sbatch and srun hands on: all, none, or those it names."""
        names = text.split(",")
        return (dict(whole) if "ALL" in map(str.upper, names) else {}) | self._given(names, whole)

    @staticmethod
    def _given(items: Sequence[str], whole: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of NAME=value words, and of words that are names alone those that are set, or
        that may stand for any name.
        """
        pairs = (item.partition("=") for item in items)
        return {
            name: value if equals else whole.get(name, "")
            for name, equals, value in pairs
            if equals or name in whole or _UNCLEAR.search(name)
        }

    def _checked(self, words: Sequence[str], script: int, line: int) -> list[str]:
        """Return the words of a job whose program is one of them; refuse any that hides options or values."""
        option = ""
        for number, word in enumerate(words):
            name, _, value = word.partition("=")
            known = name.startswith("--") and PRECISION.fullmatch(name)
            if name == "--yaml-cfg":
                self._refuse(f"{word}: the file has arguments of the job, and is not read", line)
            if stray := PRECISION.search(value if known else word) or (number < script and known):
                self._refuse(f"{stray[0]} is no argument of the job in {word}", line)
            decides = word if known or option in VALUED else name if name.startswith("-") else ""
            if _UNCLEAR.search(decides) or (number > script and word.startswith("\1")):
                self._refuse(f"{option} {word}: the script does not say the value", line)
            option = name if known and "=" not in word else ""
        return [_HIDDEN.sub("?", word) for word in words]

    # --- variables and words ----------------------------------------------------------------------

    def _assigned(self, token: _Token) -> tuple[str, list[str] | None]:
        """Return the name, and the value or the items of the array that a word assigns; None: only a name."""
        match = _ASSIGNED.fullmatch(token.text)
        assert match is not None
        name, more, text = match.groups()
        if text is None:
            return name, None
        array = text.startswith("(")
        found = _TOKEN.finditer(text[1:-1])
        parts = [each[0] for each in found if each.lastgroup == "word"] if array else [text]
        value = [word for part in parts for word in self._words(token._replace(text=part), array)]
        value = value or [""] * (not array)
        if name.startswith("NVTE_") and (array or _UNCLEAR.search(value[0])):
            self._refuse(f"{token.text}: the script does not say the value", token.line)
        old = self._variables.get(name, [self._clouded.get(name, "")]) if more else []
        return name, [*old, *value] if array or not old else ["".join((*old[:1], *value)), *old[1:]]

    def _set(self, name: str, value: list[str] | None, export: bool) -> None:
        """Assign a value, and export the name if it is to be."""
        if value is not None and name not in self._clouded:
            self._variables[name] = value
        elif value is not None and (PRECISION.search(" ".join(value)) or "\1" in "".join(value)):
            self._clouded[name] = "\1"
        self._exported |= {name} if export else set()

    def _words(self, token: _Token, split: bool = True) -> list[str]:
        """Return what bash makes of one word: expansions are split unless they are quoted."""

        def quoted(part: re.Match[str]) -> str:
            if part["expansion"]:
                values = self._values(part[0], token.line)
                return '" "'.join(re.sub(r'([\\"])', r"\\\1", each) for each in values)
            return part["escaped"] or part[0]

        def replaced(part: re.Match[str]) -> str:
            if part["expansion"]:
                values = " ".join(self._values(part[0], token.line))
                pieces = re.split(r"\s+", values) if split else [values]
                return " ".join(shlex.quote(piece) if piece else "" for piece in pieces)
            return _QUOTED_PART.sub(quoted, part[0]) if part["double"] else part[0]

        return [word for word in shlex.split(_PART.sub(replaced, token.text.replace("\\\n", ""))) if word]

    def _values(self, text: str, line: int) -> list[str]:
        """Return the values of `$NAME`, `${NAME[@]}` or `${NAME:-default}`; of others, a character."""
        match = _PARAMETER.fullmatch(text)
        if _OWN_FOLDER.fullmatch(text):
            return [str(self._path.parent.absolute())]
        if match is None:
            inner = [word for name in re.findall(r"\w+", text) for word in self._variables.get(name, ())]
            if found := PRECISION.search(" ".join((text, *inner))):
                self._refuse(f"{text}: an expansion of {found[0]} that is not read", line)
            return ["\1" if re.match(r"\$\((?!\()|`|\$\{!", text) else "\0"]
        name, index, colon, default = match[1] or match[2], match[3], match[4], match[5]
        value = self._variables.get(name, [self._clouded.get(name, "\0")])
        unset = name not in {*self._variables, *self._clouded} or (colon and value == [""])
        if default is not None and (unset or name in self._clouded):
            usual = " ".join(self._words(_Token("word", default, line), False))
            if not unset and (match := PRECISION.search(usual)):
                self._refuse(f"{text}: it is not known whether the job gets {match[0]}", line)
            value = [usual] if unset else value
        return [" ".join(value)] if index == "[*]" else value if index else value[:1]
