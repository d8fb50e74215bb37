"""The one exception a user can cause, and its four lines: what, where, why, try."""

from __future__ import annotations

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_MISSING_OPERATORS = 3
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class FirstlightError(ValueError):
    """A fault in what the user gave: a path, a config.json, a checkpoint, a flag.

    what: one line, no full stop. where: file and key. why: the rule that was broken.
    fix: what to try next. exit_code: 2 usage or configuration, 3 operators missing.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "", exit_code: int = EXIT_USAGE):
        super().__init__(what)
        self.what, self.where, self.why, self.fix, self.exit_code = what, where, why, fix, exit_code

    def __str__(self) -> str:
        lines = [f"error: {self.what}"]
        lines += [
            f"  {label:5s} {text}"
            for label, text in (("where", self.where), ("why", self.why), ("try", self.fix))
            if text
        ]
        return "\n".join(lines)


def closest(word: str, choices: list[str] | tuple[str, ...]) -> str | None:
    """Return the choice nearest in spelling to word, or None if none is near."""
    import difflib

    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.7)
    return found[0] if found else None
