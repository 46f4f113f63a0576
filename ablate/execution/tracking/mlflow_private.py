"""Private names of MLflow: the only file that may use them.

MLflow keeps one engine of SQLAlchemy for each database address and has no public way to close it. A new
version of MLflow may rename it; it has a test in tests/store/test_private_names.py.
"""


def close_database(address: str) -> None:
    """Close this process's connections of MLflow to a database, and forget them.

    Otherwise a client that is made later would use the connections of a file that was renamed meanwhile.

    Args:
        address: address of the database, as it was given to `SqlAlchemyStore`.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    engine = SqlAlchemyStore._engine_map.pop(address, None)
    if engine:
        engine.dispose()
