"""What is measured, in one object that is passed in: no module-level state, so tests and engines don't mix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """The engine's counters and gauges, on a registry of their own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.steps = Counter("tpu_infer_steps", "Steps launched", ["kind"], registry=self.registry)
        self.prompt_tokens = Counter(
            "tpu_infer_prompt_tokens", "Tokens prefilled, again after a preemption too", registry=self.registry
        )
        self.output_tokens = Counter("tpu_infer_output_tokens", "Tokens committed", registry=self.registry)
        self.preemptions = Counter("tpu_infer_preemptions", "Sequences preempted for pages", registry=self.registry)
        self.compiles_after_ready = Counter(
            "tpu_infer_compiles_after_ready", "Programs compiled while serving", registry=self.registry
        )
        self.running = Gauge("tpu_infer_running", "Sequences that hold a slot", registry=self.registry)
        self.waiting = Gauge("tpu_infer_waiting", "Sequences that wait for a slot", registry=self.registry)
        self.pages_used = Gauge("tpu_infer_pages_used", "KV pages in use", ["group"], registry=self.registry)
        self.pages_total = Gauge("tpu_infer_pages_total", "KV pages there are", ["group"], registry=self.registry)
        self.step_seconds = Histogram(
            "tpu_infer_step_seconds",
            "From a step's launch to its result on the host",
            ["kind"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
            registry=self.registry,
        )
