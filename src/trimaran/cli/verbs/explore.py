"""`trimaran explore`: a local page on which model, cluster and constraints change and the ranking follows."""

from __future__ import annotations

from typing import Annotated

import typer

from trimaran.cli.terminal import tell


def explore(
    model: Annotated[
        str, typer.Option(help="Model to open with: catalogue name, TOML file or config.json.")
    ] = "bloom-176b",
    cluster: Annotated[
        str, typer.Option(help="Cluster to open with: catalogue name or TOML file.")
    ] = "jean-zay-a100-80gb",
    gbs: Annotated[int, typer.Option(min=1, help="Global batch to open with, sequences a step.")] = 2048,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Port on this machine's loopback.")] = 8050,
) -> None:
    """Serve a page, for who has the printed address alone, that plans as you change the question. Ctrl-C ends it.

    Example: trimaran explore --model llama3-8b --cluster dgx-h100 --gbs 512
    """
    import logging
    import secrets
    import socket

    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.explore import HOST, explore_app

    token = secrets.token_urlsafe(16)
    app = explore_app(model, cluster, gbs, token)
    from werkzeug.serving import run_simple  # of Dash, which may be missing: explore_app says so

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise TrimaranError(f"--port {port} cannot be had ({error.strerror}): choose another") from None
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    tell(f"open http://{HOST}:{port}/?token={token} in a browser of this machine; Ctrl-C ends", err=True)
    # Dash's own run prints an address without the token, which answers nobody
    run_simple(HOST, port, app.server, threaded=True)
