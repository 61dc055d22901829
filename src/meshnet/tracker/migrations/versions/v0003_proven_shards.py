"""Which shards a probe has gone through, and what it is answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("shards") as shards:
        shards.add_column(sa.Column("proven", sa.Boolean()))
    # Those of an older tracker are probed when it starts.
    op.execute(sa.text("UPDATE shards SET proven = :proven").bindparams(sa.bindparam("proven", False, sa.Boolean())))
    with op.batch_alter_table("shards") as shards:
        shards.alter_column("proven", existing_type=sa.Boolean(), nullable=False)
    op.create_table(
        "probe_answers",
        sa.Column("artifact_digest", sa.String(), primary_key=True),
        sa.Column("compatibility_id", sa.String(), primary_key=True),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("node_ids", sa.JSON(), nullable=False),
    )
