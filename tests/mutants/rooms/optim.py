"""Mistakes in lmtrain/optim: norms, scales of steps, and shapes of schedules."""

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="lamb_adds_up_norms_and_not_squares",
        file="lmtrain/optim/lamb.py",
        function="LAMB._scale_to_weight_norms",
        old="self.whole.sum_over_shards(names, torch.stack(norms, dim=1).square()).sqrt().unbind(dim=1)",
        new="self.whole.sum_over_shards(names, torch.stack(norms, dim=1)).unbind(dim=1)",
        breaks="Norms of shards are added up where their squares should be, so the ratio of weight to step depends on "
        "the layout.",
        only_for="LAMB on weights that are cut or sharded, more so the less alike the shards are",
    ),
    Mutant(
        name="muon_scales_fused_matrices_as_one",
        file="lmtrain/optim/muon.py",
        function="Muon._update_matrices",
        old="""\
            updates = torch.split(self.whole.broadcast(owner, whole).to(direction.dtype), rows)
            parameter.add_(self.whole.local_shard(name, [scale_to_adam_rms(x) for x in updates]), alpha=-lr)""",
        new="""\
            updates = torch.split(scale_to_adam_rms(self.whole.broadcast(owner, whole).to(direction.dtype)), rows)
            parameter.add_(self.whole.local_shard(name, list(updates)), alpha=-lr)""",
        breaks="Queries, keys and values, and the halves of SwiGLU, move further than AdamW would move them, since the "
        "step is scaled by the rows of all sections together.",
        only_for="matrices that are several: query-key-value, and gate and up",
    ),
    Mutant(
        name="wsd_follows_the_first_quarter_of_a_wave",
        file="lmtrain/optim/schedule_settings.py",
        function="WSDSettings.after_warmup",
        old="share = 0.5 * (1.0 + math.cos(math.pi * decayed))",
        new="share = math.cos(0.5 * math.pi * decayed)",
        breaks="The decay begins as flat as a cosine and ends as steep as a line: the last step has 1.6 / n.",
        only_for="schedule.decay=cosine",
    ),
    Mutant(
        name="lamb_has_adamws_eps",
        file="conf/optim/lamb.yaml",
        function="",
        old="eps: 1.0e-6",
        new="eps: 1.0e-8",
        breaks="optim=lamb runs with another eps than its settings, its documents and its authors' code have.",
        only_for="optim=lamb",
    ),
]
