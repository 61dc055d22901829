"""The schema of the tracker's database, and how an older one becomes the present one.

Each module in ``versions`` is one step. To make another: change the tables in `database`, then
``alembic -c src/meshnet/tracker/migrations/alembic.ini revision --autogenerate -m "what changes"`` and read what it
wrote. A test compares the schema after all steps with the tables, on SQLite and PostgreSQL.
"""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from meshnet.errors import UsageError

log = logging.getLogger(__name__)

#: The table that says at which step a database is. Not alembic's usual name: others may share the database.
VERSION_TABLE = "meshnet_schema"


def upgrade(connection: Connection) -> None:
    """Bring the database up to this version of Meshnet, in one transaction. The caller commits.

    Raises:
        UsageError: a newer Meshnet has written it.
        sqlalchemy.exc.SQLAlchemyError: it failed; nothing has changed.
    """
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        # Some steps rebuild tables, and dropping one would delete what refers to it. Has no effect in a transaction.
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        # Python's driver begins a transaction before rows change, but not before tables do.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    config = configuration()
    config.attributes["connection"] = connection
    steps = ScriptDirectory.from_config(config)
    known = {step.revision for step in steps.walk_revisions()}
    reached = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_heads()
    unknown = sorted(set(reached) - known)
    if unknown:
        raise UsageError(
            f"a newer Meshnet has written it (schema {unknown[0]}, this one knows up to {steps.get_current_head()}); "
            "run that version again, or name another database"
        )
    command.upgrade(config, "head")
    newest = steps.get_current_head()
    if reached and reached != (newest,):
        log.info("the database was brought from schema %s to %s", ", ".join(reached), newest)


def configuration() -> Config:
    """Alembic's settings for these steps, wherever the package is installed."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
