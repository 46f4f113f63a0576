"""Reasons why hardware or a library cannot compute a product: sentences that keep the slot they are about.

    Reason("fprop.x", ".element int4: tensor cores multiply e2m1, e4m3 and e5m2")

Six operands of one recipe often have the same fault. `grouped` makes one line of those that differ in the
slot alone: `fprop.x, fprop.w: element int4: ...`.
"""

from collections.abc import Iterable


class Reason(str):
    """Sentence about a slot or a product."""

    __slots__ = ("at", "text")
    at: str
    text: str

    def __new__(cls, at: str, text: str) -> "Reason":
        made = super().__new__(cls, at + text)
        made.at, made.text = at, text
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        """Return the arguments of a copy."""
        return self.at, self.text


def grouped(reasons: Iterable[str]) -> tuple[str, ...]:
    """Return reasons in their order, each once; those that differ in the slot alone as one."""
    slots: dict[str, dict[str, None]] = {}
    whole: dict[str, str] = {}
    for reason in reasons:
        text = reason.text if isinstance(reason, Reason) else reason
        slots.setdefault(text, {})
        if isinstance(reason, Reason):
            slots[text][reason.at] = None
        whole.setdefault(text, str(reason))
    return tuple(
        whole[text] if len(at) < 2 else f"{', '.join(at)}: {text.lstrip('.: ')}" for text, at in slots.items()
    )


def all_of(reasons: Iterable[str]) -> str:
    """Return the reasons of one refusal as one text, grouped; empty without any."""
    return "; also ".join(grouped(reasons))
