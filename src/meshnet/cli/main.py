"""``meshnet``: one module per command. What goes wrong on purpose is one line on standard error and exit code 2."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from meshnet.cli import (
    artifact,
    artifact_store,
    artifact_swarm,
    chat,
    demo,
    doctor,
    ledger,
    measure,
    node,
    plan,
    serve,
    status,
)
from meshnet.cli.logs import LEVELS, set_up_logging
from meshnet.errors import MeshnetError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MeshnetError as error:
            # One line, whatever a peer put into its message.
            typer.echo(f"meshnet: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Serve open models too large for one machine over several.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def main(
    log_level: Annotated[
        str, typer.Option(help=f"What goes to standard error: {', '.join(LEVELS)}.", envvar="MESHNET_LOG")
    ] = "info",
) -> None:
    set_up_logging(log_level)


app.command("serve")(serve.serve)
app.command("node")(node.node)
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("plan")(plan.plan)
app.command("measure")(measure.measure)
app.command("ledger")(ledger.ledger)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
artifact.app.command("list")(artifact_store.list_)
artifact.app.command("verify")(artifact_store.verify)
artifact.app.command("remove")(artifact_store.remove)
artifact.app.command("publish")(artifact_swarm.publish)
artifact.app.command("seed")(artifact_swarm.seed)
artifact.app.command("pull")(artifact_swarm.pull)
app.add_typer(artifact.app, name="artifact")
