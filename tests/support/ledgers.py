"""Contents of ledgers, and damage to their files."""

from support.experiments import ledger


def overwrite_middle(content: bytes) -> bytes:
    """Overwrite every page but the first two and the last."""
    page = int.from_bytes(content[16:18], "big")
    return content[: 2 * page] + b"\xa5" * (len(content) - 3 * page) + content[-page:]


def ledger_content(state, name: str = "tiny") -> dict:
    """Return all that a ledger records of its sweep, without ids and dates."""
    book = ledger(state, name)
    recorded = {
        "facts": {
            key: book.fact(key) for key in ("name", "question", "metric", "metrics", "experiment.yaml")
        },
        "arms": [(arm.name, arm.knobs, arm.optuna) for arm in book.arms()],
        "members": [(m.arm, m.name, m.seed, m.id, m.status, m.spec) for m in book.members()],
        "records": {m.id: list(book.records(m.trial)) for m in book.members()},
    }
    book.close()
    return recorded
