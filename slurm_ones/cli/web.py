"""Command `slurm-ones web`: server of the live page."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from typing import Annotated

import typer

from ones_db import Store, StoreError
from slurm_ones.cli.common import ConfigOption, DatabaseOption, command, complain, say, settings_of, store_of_reader
from slurm_ones.config import ConfigError
from slurm_ones.show import page_lacks
from slurm_ones.show.live import NotSeenYet
from slurm_ones.text import plain


@command
def web(
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65535)] = 8675,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    root: Annotated[str, typer.Option(help="Path under which a proxy serves the page, such as /node/n1/8675.")] = "",
    token: Annotated[
        str, typer.Option(envvar="SLURM_ONES_WEB_TOKEN", help="Secret that opens the page (default: a new one).")
    ] = "",
    user_header: Annotated[
        str, typer.Option(help="Proxy's HTTP header that names the user, who sees only their jobs; replaces the token.")
    ] = "",
    config: ConfigOption = None,
    database: DatabaseOption = "",
) -> None:
    """Serve a live page of the cluster, its jobs and the decisions about them. The page changes nothing."""
    if missing := page_lacks():
        raise StoreError(f"the page needs {', '.join(missing)}: pip install 'slurm-ones[web]'")
    import uvicorn

    from slurm_ones.show.app import Web, address
    from slurm_ones.show.connections import OPTIONS, BoundedSocket
    from slurm_ones.show.logs import Logs

    if token and user_header:
        raise typer.BadParameter(
            "--user-header and a token (--token, SLURM_ONES_WEB_TOKEN) exclude each other: with the header, "
            "the proxy decides who may look, and the token has no effect; leave one of them out"
        )
    settings = settings_of(config, database)

    def opened() -> Store:
        try:
            return store_of_reader(settings, named=bool(database))
        except (ConfigError, NotSeenYet) as error:
            raise StoreError(str(error)) from error

    # What is wrong is reported at once.
    store_of_reader(settings, named=bool(database)).close()
    secret = "" if user_header else token or secrets.token_urlsafe(24)
    # Behind a proxy many users share this process, which a file on a path that hangs could stop.
    logs = None if user_header else Logs(settings, own_only=True)
    app = Web(opened, secret, root, logs, user_header).app
    # Bound before it is named: nobody else can get the port in between.
    listening = _listening(host, port)
    say(f"The live page: {address(host, listening.getsockname()[1], root, secret)}")
    if host in ("127.0.0.1", "localhost", "::1"):
        say_tunnel(listening.getsockname()[1])
    say("Ctrl-C ends it.")
    server = uvicorn.Server(uvicorn.Config(app, **OPTIONS))
    with suppress(KeyboardInterrupt):
        server.run([BoundedSocket(listening, server.server_state.connections)])
    if not server.started:
        raise typer.Exit(1)


def say_tunnel(port: int) -> None:
    """Print the SSH command with which a user makes this machine's port reachable from their own machine."""
    if "SSH_CONNECTION" in os.environ:
        say(f"From your own machine: ssh -L {port}:localhost:{port} {socket.gethostname()}")


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address. On failure exit with code 1, so that systemd tries again."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        # Python adds the address to some texts.
        text = os.strerror(code) if isinstance(error, OSError) and (code := error.errno or 0) > 0 else str(error)
        complain(f"cannot listen on {plain(host)}, port {port} ({text}); name another --port or --host")
        raise typer.Exit(1) from None
