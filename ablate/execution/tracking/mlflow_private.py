"""Private names of MLflow: the only file that may use them.

MLflow keeps one engine of SQLAlchemy for each database address and has no public way to close it. A new
version of MLflow may rename it; it has a test in tests/store/test_private_names.py.
"""

import sys


def close_database(address: str) -> None:
    """Close this process's connections of MLflow to a database, by the address that `SqlAlchemyStore` was
    given.

    Otherwise a client that is made later would use the connections of a file that was replaced meanwhile.
    Does nothing before MLflow's store is imported: an import here would come before the settings of
    `access.import_client`.
    """
    stores = sys.modules.get("mlflow.store.tracking.sqlalchemy_store")
    # The engine stays in the map: MLflow's clients share one store per address, which keeps its engine, and
    # this must find that engine the next time, too.
    engine = stores and stores.SqlAlchemyStore._engine_map.get(address)
    if engine:
        engine.dispose()
