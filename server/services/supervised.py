"""The real processes behind the planned engines."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx.engine.host.service_supervisor import ServiceSupervisor
from vllm_mlx.engine.logs import level_name
from vllm_mlx.server.services.plan import ServicePlan
from vllm_mlx.server.services.port import ServicePort

#: Of an engine beside a chat model: who waits for a token goes first.
_NICENESS_BESIDE_CHAT = 10


def supervised(
    plans: Sequence[ServicePlan], step_timeout_s: float, *, beside_chat: bool
) -> list[tuple[ServicePlan, ServicePort]]:
    """Return each plan with the supervisor of a process for it, not started."""
    niceness = _NICENESS_BESIDE_CHAT if beside_chat else 0
    return [
        (
            plan,
            ServiceSupervisor(
                plan.kind,
                plan.config,
                step_timeout_s=step_timeout_s,
                log_level=level_name(),
                niceness=niceness,
            ),
        )
        for plan in plans
    ]
