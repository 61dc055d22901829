"""Called by alembic: with the connection of `upgrade`, or from its command line with a scratch database."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from meshnet.tracker.database import Base
from meshnet.tracker.migrations import VERSION_TABLE


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        # SQLite cannot change a column; the table is made anew and the rows copied.
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(context.config.get_main_option("sqlalchemy.url") or "sqlite://").begin() as connection:
        run(connection)
