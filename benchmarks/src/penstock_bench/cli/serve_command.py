"""The bench of the server: agents over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.cli import options
from penstock.cli.settings_options import Fields, with_settings
from penstock_bench.bench_settings import ServeSettings
from penstock_bench.cli.bench_options import Plot, Save, Which, engine_shape, finish


@with_settings
def serve(
    model: Which = "random",
    *,
    load: Annotated[dict[str, Any], Fields(ServeSettings, variables=False)],
    codec: options.EngineCodec,
    as_json: options.Json = False,
    save: Save = None,
    plot: Plot = None,
) -> None:
    """Let agents talk with the server over HTTP.

    The other side is mlx-lm's server on the same model. Exits with 1 if a goal is not met.
    """
    from penstock_bench.models import ModelChoice
    from penstock_bench.serve_load import ServeLoad
    from penstock_bench.serve_picture import draw
    from penstock_bench.serve_runs import measure

    report = measure(ServeLoad(model=ModelChoice(model), engine=engine_shape(codec), **load))
    finish(report, as_json=as_json, save=save, plot=plot, draw=draw)
