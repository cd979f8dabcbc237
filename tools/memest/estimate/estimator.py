"""Estimates a case: the plan that `offload train` or `offload generate` would choose, its peaks,
and the time of its step or passes."""

from dataclasses import dataclass, field, replace

from offload.config import OffloadConfig
from offload.planning.activations.facts import NOTHING, ActivationFacts
from offload.planning.choice.planner import RunPlan, plan_run, resolved_config
from offload.planning.choice.solver import RunFacts
from offload.planning.machine.baseline import known_baseline
from offload.planning.machine.speeds import NOMINAL
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.step.step_time import estimate_step
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.result import Estimate, InferenceEstimate, active_numel
from offload.tools.memest.estimate.shortfalls import baseline_note, run_shortfalls
from offload.tools.memest.generation import CacheShape, generation_facts
from offload.zero.groups.model_shape import ModelShape

# transformers with a tokenizer and `generate`, beside what training takes: 141 MiB in two runs of
# `offload generate` on 2 cores, transformers 5.17.
_TRANSFORMERS_NBYTES = 141 << 20
# Beside a parameter's values: its entry in the manifest, and one in the header of each file.
_NAMED_NBYTES, _TENSOR_NBYTES = 230, 120


@dataclass
class Estimator:
    """Estimates cases of one model; the facts about a pass are found once per kind of pass."""

    _passes: dict[object, ActivationFacts] = field(default_factory=dict)

    def __call__(self, case: Case) -> Estimate:
        """Return the estimate of the best plan that the configuration allows, fitting or not."""
        planned = self._planned(case)
        best = planned.best
        step = best.step if case.timed else None
        return Estimate(
            model=case.source.name,
            numel=case.source.shape.numel,
            numel_trainable=case.source.shape.numel_trainable if case.generation is None else 0,
            hardware=case.profile.text,
            workload=case.workload,
            config=resolved_config(best.config, best.plan, "cuda" if best.plan.gpu else "cpu"),
            plan=best.plan,
            memory=planned.memory,
            checkpoint_nbytes=checkpoint_nbytes(best.plan, best.config, case.shape),
            step=step,
            shortfalls=run_shortfalls(planned),
            notes=(baseline_note(planned.run.baseline),),
            active_numel=active_numel(case.shape) if case.shape.tables else None,
            inference=None if case.generation is None else self._inference(case, planned),
            system_nbytes=case.profile.system_nbytes // case.profile.ranks_per_node,
            endurance_nbytes=case.speeds.endurance_nbytes if case.speeds is not None else 0,
        )

    def _inference(self, case: Case, planned: RunPlan) -> InferenceEstimate:
        """The prefill and the cache of the generation that is asked for, where they are known."""
        best, generation = planned.best, case.generation
        assert generation is not None, "what is asked for"
        if not case.source.has_graph:
            return InferenceEstimate(generation, None, None, None)
        held = token = prefill = None
        itemsize, cache = ITEMSIZE[best.config.precision], case.source.cache
        if cache is not None:
            held = generation.batch * itemsize * cache.kept_numel(generation.context)
            token = itemsize * cache.token_numel
        if case.timed and case.speeds is not None and best.step is not None:
            facts = self._pass(case, best.config, generation.prefill, trains=False)
            prefill = estimate_step(
                best.plan, best.config, planned.model, facts, generation.prefill, case.speeds
            )
        return InferenceEstimate(generation, prefill, held, token)

    def facts(self, case: Case, config: OffloadConfig) -> ActivationFacts:
        """Return the memory and operations of one pass under `config`; `NOTHING` if the model's
        code is not known."""
        if not case.source.has_graph:
            return NOTHING
        generation = case.generation
        if generation is None:
            return self._pass(case, config, case.workload, trains=True)
        prefill, decode = (
            self._pass(case, config, each, trains=False)
            for each in (generation.prefill, generation.decode)
        )
        itemsize, cache = ITEMSIZE[config.precision], case.source.cache or CacheShape(())
        in_tiers = config.placement.kv is not None and cache.token_numel > 0
        return generation_facts(prefill, decode, cache, generation, itemsize, in_tiers=in_tiers)

    def _pass(
        self, case: Case, config: OffloadConfig, workload: Workload, *, trains: bool
    ) -> ActivationFacts:
        """One pass, found once per kind of pass and workload."""
        source, device = case.source, "cuda" if case.profile.gpu_nbytes else "cpu"
        given = config.placement.activations
        settings = (given.checkpoint, given.tiled_mlp) if trains else None
        work = workload.batch, workload.sequence
        key = source.fingerprint, config.precision, settings, work, device
        if key not in self._passes:
            self._passes[key] = source.activations(config, workload, device, trains=trains)
        return self._passes[key]

    def _planned(self, case: Case) -> RunPlan:
        baseline = known_baseline(case.config.precision, gpu=case.profile.gpu_free_nbytes > 0)
        if case.generation is not None:
            baseline = replace(baseline, ram_nbytes=baseline.ram_nbytes + _TRANSFORMERS_NBYTES)
        elif case.source.has_graph:
            baseline = baseline.that_plans()
        run = RunFacts(
            case.workload, case.speeds or NOMINAL, lambda config: self.facts(case, config), baseline
        )
        return plan_run(case.config, case.shape, case.hardware, run, traced=case.source.has_graph)


def checkpoint_nbytes(plan: Plan, config: OffloadConfig, model: ModelShape) -> int:
    """The bytes of the files of one checkpoint, with all ranks' experts: the states without padding
    and about what their names take. The model's persistent buffers, which are not in a
    `ModelShape`, are left out. Two checkpoints exist while one replaces another."""
    total = 0
    for group in model.groups:
        kept = plan.record_format.of(matrices=group.matrices)
        for spec in group.layout.params:
            fields = kept.fields if spec.trainable else ()
            states = sum(each.numel(spec.numel) * each.dtype.itemsize for each in fields)
            saved = 1 + len(fields)
            named = _NAMED_NBYTES + saved * (_TENSOR_NBYTES + len(spec.names[0]))
            total += group.ep_size * (spec.numel * ITEMSIZE[config.precision] + states + named)
    return total
