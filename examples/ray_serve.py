"""Replicas of jaxspec on Ray Serve: `serve run examples.ray_serve:app`, from the repository's root.

It needs `pip install "ray[serve]"` beside jaxspec. A replica is one engine. Ray starts, watches, restarts and scales
replicas, and one port serves them all, streams included. Requests with the same `x-session-id` go to the same replica,
whose prefix cache knows their conversation. Others go anywhere. To route by the prompt's own prefix, put sglang-router
or vllm-router in front of plain servers instead (docs/scaling.md).

Environment: `JAXSPEC_MODEL`, `JAXSPEC_DRAFT`, `JAXSPEC_OPTIONS` (other engine options, a JSON object),
`JAXSPEC_REPLICAS` (the fewest, 2), `JAXSPEC_MAX_REPLICAS` (the most, the same), `JAXSPEC_GPUS` (of a replica, 1; 0: it
runs on CPUs).
"""

import json
import os

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

OPTIONS = {
    "model": os.environ.get("JAXSPEC_MODEL", "smollm2-135m-instruct"),
    "draft": os.environ.get("JAXSPEC_DRAFT", "auto"),
    **json.loads(os.environ.get("JAXSPEC_OPTIONS", "{}")),
}
REPLICAS = int(os.environ.get("JAXSPEC_REPLICAS", "2"))
MOST = int(os.environ.get("JAXSPEC_MAX_REPLICAS", REPLICAS))
GPUS = int(os.environ.get("JAXSPEC_GPUS", "1"))


@serve.deployment(
    ray_actor_options={"num_gpus": GPUS, "num_cpus": 1},
    autoscaling_config=AutoscalingConfig(min_replicas=REPLICAS, max_replicas=MOST, target_ongoing_requests=64),
    max_ongoing_requests=512,  # the engine queues by itself, first come first served
    health_check_period_s=5,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=30,
    request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
)
@serve.ingress()
class Replica:
    """An engine behind the server's own routes. It is ready once its programs are compiled."""

    def __init__(self, options: dict):
        from jaxspec import AsyncLLM  # here, so that Ray's proxy and controller never import jax

        self.llm = AsyncLLM(**options)

    def __serve_build_asgi_app__(self):
        from server.app import create_app

        return create_app(self.llm)

    def check_health(self):
        """**Raises:** what ended the engine, and Ray replaces the replica."""
        if self.llm.error is not None:
            raise self.llm.error

    def __del__(self):
        if hasattr(self, "llm"):  # it isn't if the engine refused its options
            self.llm.close()


app = Replica.bind(OPTIONS)
