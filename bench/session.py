"""One run of the load generator, from finding the server to the last row."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from vllm_mlx.bench.columns import SCHEMA_VERSION
from vllm_mlx.bench.configuration import Configuration
from vllm_mlx.bench.endpoints import Ask, endpoint_named
from vllm_mlx.bench.http_client import Address, HttpClient
from vllm_mlx.bench.http_connection import ExchangeError
from vllm_mlx.bench.metrics import Slo, measures
from vllm_mlx.bench.plan import Plan, Planned
from vllm_mlx.bench.preparation import Preparation
from vllm_mlx.bench.requester import Requester
from vllm_mlx.bench.results import (
    Results,
    Row,
    bench_row,
    case_row,
    quality_columns,
    request_row,
)
from vllm_mlx.bench.runner import ClientCost, Runner
from vllm_mlx.bench.server_info import (
    ServerInfo,
    ServerSnapshot,
    choose_model,
    server_columns,
    take_snapshot,
    wait_for_server,
)
from vllm_mlx.bench.settings import BenchSettings
from vllm_mlx.bench.timeline import Place, RequestRecord, RequestRecorder
from vllm_mlx.engine.errors import UnreachableError

_PROBE_TOKENS = 2
#: Above these the client itself may have shaped the figures.
_MAX_CLIENT_CPU = 0.7
_MAX_CLIENT_LAG_MS = 10.0
_RETRY_S = 0.5


class Progress(Protocol):
    """Hear how far a run is; called from the event loop, so every call must be short."""

    def say(self, text: str) -> None:
        """Tell what is being done."""
        ...

    def began(self, label: str, repetition: int, runner: Runner) -> None:
        """Begin to watch a repetition; `runner` has its records so far."""
        ...

    def ended(self, row: Row | None) -> None:
        """Stop watching it; None when it was interrupted before anything ended."""
        ...


@dataclasses.dataclass(frozen=True)
class _Target:
    """Hold what the run found out before it measured."""

    info: ServerInfo
    model: str
    is_held: bool


class Session:
    """Run a plan against one server; made and awaited once.

    `accept` is called with the columns that are the same in all rows, before anything is
    measured: a caller can still refuse, for example a baseline from elsewhere.
    """

    def __init__(
        self,
        settings: BenchSettings,
        plan: Plan,
        *,
        slo: Slo | None,
        environment: Mapping[str, Any],
        progress: Progress,
        accept: Callable[[Mapping[str, Any]], None],
        connect: Callable[[Address], HttpClient] = HttpClient,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._slo = slo
        self._environment = environment
        self._progress = progress
        self._accept = accept
        self._connect = connect
        self._results = Results()
        self._run_id = secrets.token_hex(6)

    async def run(self) -> Results:
        """Measure everything and return the rows; cancelling it returns those there are.

        Raises `UnreachableError` when nothing could be measured; when that happens later, the
        rows until then are returned with the error beside them.
        """
        client = self._connect(Address.parse(self._settings.url))
        requester = Requester(
            client,
            endpoint_named(self._settings.endpoint),
            api_key=self._settings.api_key,
            timeout_s=self._settings.request_timeout_s,
        )
        try:
            await self._run(requester)
        except asyncio.CancelledError:
            self._results.is_interrupted = True
        except UnreachableError as error:
            if not self._results.rows:
                raise
            self._results.failure = error
        finally:
            client.close()
        self._note_client()
        return self._results

    async def _run(self, requester: Requester) -> None:
        settings = self._settings
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.wait_s
        info = await wait_for_server(
            requester, settings.wait_s, lambda why: self._progress.say(f"waiting: {why}")
        )
        model = choose_model(info, settings.model)
        preparation = Preparation(requester, model, settings.seed, settings.extra_body)
        target = await self._probe(requester, preparation, info, model, deadline)
        common = self._common_columns(requester, target)
        self._accept(common)
        await self._empty_cache(requester, "before-run")
        for repetition in range(1, settings.repetitions + 1):
            for planned in self._plan.planned:
                await self._repetition(requester, preparation, target, planned, repetition, common)

    async def _probe(
        self,
        requester: Requester,
        preparation: Preparation,
        info: ServerInfo,
        model: str,
        deadline: float,
    ) -> _Target:
        """Ask one short question that begins like nothing measured.

        It finds a wrong key or model before minutes are spent, and whether the server takes the
        fields that hold the length. Raises `UnreachableError`.
        """
        wants_held = bool(self._settings.output_tokens)
        loop = asyncio.get_running_loop()
        is_held = wants_held
        while True:
            record = await self._ask_probe(requester, preparation, model, is_held=is_held)
            if record.is_ok or (record.failure is not None and record.failure.kind == "empty"):
                return _Target(info, model, is_held)
            assert record.failure is not None
            if is_held and record.failure.kind in ("http_400", "http_422"):
                is_held = False
                continue
            is_loading = record.failure.kind in ("http_503", "connect", "cut")
            if not is_loading or loop.time() >= deadline:
                raise UnreachableError(
                    f"cannot measure {requester.client.address.url} with model '{model}': "
                    f"{record.failure.kind}: {record.failure.message}"
                )
            self._progress.say(f"waiting: {record.failure.message}")
            await asyncio.sleep(_RETRY_S)

    async def _ask_probe(
        self, requester: Requester, preparation: Preparation, model: str, *, is_held: bool
    ) -> RequestRecord:
        loop = asyncio.get_running_loop()
        prompt = preparation.throwaway()
        ask = Ask(
            model=model,
            messages=prompt.messages,
            max_tokens=_PROBE_TOKENS,
            is_streamed=self._settings.stream,
            temperature=self._settings.temperature,
            is_held=is_held,
            extra=self._settings.extra_body,
        )
        recorder = RequestRecorder(
            requester.endpoint,
            Place(-1, "probe"),
            scheduled_at=loop.time(),
            is_streamed=self._settings.stream,
            max_tokens=_PROBE_TOKENS,
        )
        record = await requester.send(requester.encode(ask), recorder)
        preparation.learn(prompt, record.answer.prompt_tokens)
        return record

    async def _repetition(
        self,
        requester: Requester,
        preparation: Preparation,
        target: _Target,
        planned: Planned,
        repetition: int,
        common: Mapping[str, Any],
    ) -> None:
        settings, configuration = self._settings, planned.configuration
        self._progress.say(f"{configuration.label}, repetition {repetition}: preparing")
        prepared = await preparation.prepare(planned)
        runner = Runner(
            requester,
            configuration,
            target.model,
            is_held=target.is_held,
            seed=settings.seed,
            before_each=self._before_each(requester),
        )
        if repetition == 1 and settings.warmup:
            num = settings.warmup * planned.num_at_once
            warmup = preparation.warmup(prepared.measured, num)
            await runner.send_unmeasured(warmup, configuration.max_tokens)
        await runner.send_unmeasured(prepared.priming, 1)
        before = await take_snapshot(requester)
        how = {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "repetition": repetition,
            "prompt_tokens_source": preparation.tokens_source,
            "output_control": self._output_control(target, configuration),
        }
        self._progress.began(configuration.label, repetition, runner)
        row: Row | None = None
        try:
            cost = await runner.measure(prepared.measured, repetition)
            after = await take_snapshot(requester)
            row = self._add_rows(planned, runner, [common, how], cost, (before, after))
        except asyncio.CancelledError:
            if runner.records:
                how["is_partial"] = True
                row = self._add_rows(planned, runner, [common, how], None, None)
            raise
        finally:
            self._progress.ended(row)
        self._judge(configuration, runner.records)

    def _add_rows(
        self,
        planned: Planned,
        runner: Runner,
        parts: list[Mapping[str, Any]],
        cost: ClientCost | None,
        snapshots: tuple[ServerSnapshot, ServerSnapshot] | None,
    ) -> Row:
        configuration, records = planned.configuration, runner.records
        identity: dict[str, Any] = {"is_partial": False}
        for part in parts:
            identity |= part
        which = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self._run_id,
            "model": identity["model"],
            "configuration": configuration.label,
            "prompt_set": configuration.prompt_set,
            "cache_mode": configuration.cache_mode,
            "concurrency": configuration.concurrency,
            "request_rate_target": configuration.request_rate_target,
            "repetition": identity["repetition"],
        }
        cases = [
            case_row(which, record, planned.cases[record.place.prompt_id])
            for record in records
            if planned.cases
        ]
        row = bench_row(
            identity,
            {"configuration": configuration.label},
            configuration.columns(),
            measures(records, self._slo),
            quality_columns(cases) if planned.cases else {},
            cost.columns(records) if cost is not None else {},
            server_columns(*snapshots) if snapshots is not None else {},
        )
        began_at = min((r.scheduled_at for r in records), default=0.0)
        self._results.rows.append(row)
        self._results.cases += cases
        self._results.requests += [request_row(which, r, began_at, self._slo) for r in records]
        self._note(row)
        return row

    def _common_columns(self, requester: Requester, target: _Target) -> dict[str, Any]:
        settings, address = self._settings, requester.client.address
        return {
            "run_id": self._run_id,
            "tag": settings.tag,
            "url": address.url,
            "server": target.info.server,
            "server_version": target.info.version,
            "model": target.model,
            "seed": settings.seed,
            "warmup": settings.warmup,
            "slo": dict(self._slo.limits_s) if self._slo is not None else None,
            "server_device": target.info.device,
            "server_is_local": address.is_local,
            "command": settings.command,
            **self._environment,
        }

    def _output_control(self, target: _Target, configuration: Configuration) -> str:
        is_held = target.is_held and configuration.output_tokens_target is not None
        return "ignore_eos" if is_held else "none"

    async def _empty_cache(self, requester: Requester, when: str) -> None:
        """Empty the server's prefix cache if the workload wants it now."""
        workload = self._plan.workload
        if workload is None or workload.cache_policy != when:
            return
        try:
            reply = await requester.delete("/v1/cache")
        except ExchangeError as error:
            raise UnreachableError(f"the cache cannot be emptied: {error.message}") from error
        if not 200 <= reply.status < 300:
            raise UnreachableError(
                f"the workload wants the cache emptied {when}, but DELETE /v1/cache answers "
                f"{reply.status}; set its cache_policy to preserve and use --cache-mode cold"
            )

    def _before_each(self, requester: Requester) -> Callable[[], Awaitable[None]] | None:
        workload = self._plan.workload
        if workload is None or workload.cache_policy != "before-case":
            return None
        return lambda: self._empty_cache(requester, "before-case")

    def _judge(self, configuration: Configuration, records: list[RequestRecord]) -> None:
        """Raise `UnreachableError` when too few requests were answered."""
        num_ok = sum(record.is_ok for record in records)
        if records and num_ok > 0 and num_ok >= self._settings.min_success * len(records):
            return
        failed = next((r.failure for r in records if r.failure is not None), None)
        why = f"; the first failure is {failed.kind}: {failed.message}" if failed else ""
        raise UnreachableError(
            f"{configuration.label}: {num_ok} of {len(records)} requests were answered, fewer "
            f"than --min-success {self._settings.min_success:g} allows{why}"
        )

    def _note(self, row: Row) -> None:
        """Note what limits the worth of a row's figures."""
        target, results = row["output_tokens_target"], self._results
        if target is not None and row["output_reached"] is not None and row["output_reached"] < 1:
            results.note(
                f"not every answer has the {target} tokens of --output-tokens "
                "(column output_reached)"
            )
        wanted = row["prompt_tokens_target"]
        if wanted is not None and row["prompt_tokens"] is not None:
            lengths = (row["prompt_tokens_min"], row["prompt_tokens_max"])
            if lengths != (wanted, wanted) and row["turns"] == 1:
                results.note(
                    f"prompts have {lengths[0]} to {lengths[1]} tokens, not exactly {wanted}"
                )

    def _note_client(self) -> None:
        """Note how busy the client was at its worst, where that may have shaped the figures."""
        rows = self._results.rows
        lag = max((row["client_lag_max"] or 0.0 for row in rows), default=0.0)
        cpu = max((row["client_cpu"] or 0.0 for row in rows), default=0.0)
        if lag > _MAX_CLIENT_LAG_MS or cpu > _MAX_CLIENT_CPU:
            self._results.note(
                f"the client itself was held up at times (at worst {lag:.0f} ms, {cpu:.0%} of a "
                "core): latencies may be too long by that much; a quieter machine helps"
            )
