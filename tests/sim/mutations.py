"""Does the simulator find faults? Each of these changes a piece of code; each must be found.

    python -m tests.sim.mutations [--seeds 200] [--only NAME]

The tree is copied, the code changed, and the worlds run until one fails. What was found, and after how many seeds, is
printed as a table. A mutation whose code is no longer there is an error: the list is kept true by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.sim.planted import ROOT, Mutation, plant

MUTATIONS = [
    Mutation(
        "prompts: a short one that went first goes on once more",
        "admission:Admission.add_prompts",
        "if id(state) not in added:",
        "if True:",
    ),
    Mutation(
        "prompts: what short ones take is not taken from the step",
        "admission:Admission._admit_short",
        "self._add_prefill(opened, state, room, short)",
        "self._add_prefill(opened, state, short)",
    ),
    Mutation(
        "encoder: its builder reads lengths of the device",
        "cross:CrossBackend.build",
        "seq_lens_cpu_upper_bound=np.full(common.num_reqs, self._max_entries, dtype=np.int32),",
        "seq_lens_cpu_upper_bound=lens.cpu().numpy(),",
    ),
    Mutation(
        "encoder: a request reads the pages of another",
        "cross:CrossBackend.build",
        "gather_encoder_pages(common.encoder, common.batch_rows)",
        "gather_encoder_pages(common.encoder, common.batch_rows.roll(1))",
    ),
    Mutation(
        "encoder: its output is given back while it is read",
        "request_pages:RequestPages.remember_encoded",
        "state.is_encoding = False",
        "state.is_encoding = False; self.pool.give_back(state.encoder_page_ids); state.encoder_page_ids = []",
    ),
    Mutation(
        "encoder: an input is overwritten while its copy is in flight",
        "encoder_step:EncoderStep.run",
        "slot, begin = self.ring.acquire(), 0",
        "slot, begin = self.ring.slots[0], 0",
    ),
    Mutation(
        "encoder: a part of its output is taken for all",
        "request_pages:RequestPages._find_encoded",
        "return found if len(found) == num_pages else []",
        "return found",
    ),
    Mutation(
        "encoder: the cache is told of tokens alone",
        "runner:Runner.cache_key",
        "return own if request.encoder is None else request.encoder.digest() + own",
        "return own",
    ),
    Mutation(
        "encoder: every second request is not encoded",
        "request_pages:RequestPages.move_in",
        "state.is_encoding = bool(num_encoded) and not cached.encoded",
        "state.is_encoding = bool(num_encoded) and not cached.encoded and not state.arrival_idx % 2",
    ),
    Mutation(
        "early exit: the first pass begins one token early",
        "early_exit:EarlyExitSpeculator.first_ids",
        "firsts = rows.num_computed.index_select(0, batch.rows)",
        "firsts = rows.num_computed.index_select(0, batch.rows) - 1",
    ),
    Mutation(
        "states: a step continues after its own drafts",
        "gdn:GDNAttentionMetadata.build",
        "positions=common.seq_lens - common.query_lens,",
        "positions=(common.seq_lens - 1).clamp(min=0),",
    ),
    Mutation(
        "states: one too few for the drafts of a step",
        "gdn:DeltaNetSpec.ring_lengths",
        "num_states = 1 + num_drafts",
        "num_states = max(1, num_drafts)",
    ),
    Mutation(
        "states: what is convolved is forgotten too early",
        "gdn:DeltaNetSpec.ring_lengths",
        "return self.conv_width - 1 + num_states, num_states",
        "return self.conv_width - 3 + num_states, num_states",
    ),
    Mutation(
        "states: everybody's in row 0",
        "gdn:GDNAttentionMetadata.build",
        "slots=common.batch_rows,",
        "slots=common.batch_rows.clamp(min=0, max=0),",
    ),
    Mutation(
        "states: pages are shared though they have none",
        "resolve:resolve",
        "prefix_caching=options.enable_prefix_caching and not refusal,",
        "prefix_caching=options.enable_prefix_caching,",
    ),
    Mutation(
        "scheduler: draws in flight are not counted",
        "open_plan:OpenPlan.add_prefill",
        "state.num_draws_in_flight += samples",
        "state.num_draws_in_flight += 0",
    ),
    Mutation(
        "steady batch: draws in flight are not counted",
        "steady_batch:SteadyBatch.repeat",
        "state.num_computed += 1\n                state.num_draws_in_flight += 1",
        "state.num_computed += 1",
    ),
    Mutation(
        "steady batch: page borders are not seen",
        "steady_batch:SteadyBatch._count_repeats",
        "num_left = min(state.max_total - 1, state.capacity - state.num_ahead) - bound",
        "num_left = state.max_total - 1 - bound",
    ),
    Mutation(
        "steady batch: bounds go on evenly while drafts are in flight",
        "steady_batch:SteadyBatch.__init__",
        "not num_drafts and not any(state.num_drafts_in_flight for state in states)",
        "not num_drafts",
    ),
    Mutation(
        "steady batch: a new request does not end it",
        "scheduler:Scheduler.add",
        "self._steady = None\n        bisect.insort(self.waiting, state, key=_rank)",
        "bisect.insort(self.waiting, state, key=_rank)",
    ),
    Mutation(
        "staging: the batch stays what it was in the first step",
        "batch:BatchPreparer.prepare",
        "if batch is None or batch.composition is not composition:",
        "if batch is None:",
    ),
    Mutation(
        "scheduler: the last token may come from the cache",
        "request_pages:RequestPages._find_prefix",
        "num_pages = (len(state.token_ids) - 1) // self.pool.page_size",
        "num_pages = len(state.token_ids) // self.pool.page_size",
    ),
    Mutation(
        "scheduler: a page is remembered before its last token is computed",
        "collected_step:TokenCollector.take_each",
        "self._pages.remember(state, len(state.token_ids) - 1 if",
        "self._pages.remember(state, len(state.token_ids) if",
    ),
    Mutation(
        "scheduler: pages for one token too few",
        "request_pages:RequestPages.reserve",
        "missing = self.pool.pages_for(state.num_slots) - len(state.page_ids)",
        "missing = self.pool.pages_for(state.num_slots - 1) - len(state.page_ids)",
    ),
    Mutation(
        "pages: a page with a holder left is given back",
        "pages:PagePool.give_back",
        "if self._num_holders[page_id] > 0:",
        "if self._num_holders[page_id] > 1:",
    ),
    Mutation(
        "pages: a held page may still be forgotten",
        "pages:PagePool.hold",
        "self._unheld.pop(page_id, None)",
        "self._unheld.get(page_id, None)",
    ),
    Mutation(
        "pages: hashes do not know what came before",
        "pages:page_hashes",
        "key=parent[:64], digest_size=16",
        'key=b"", digest_size=16',
    ),
    Mutation(
        "staging: the last change is lost",
        "request_state:RequestRows.stage_batch",
        "changed = np.flatnonzero(columns != self._batch_mirror)",
        "changed = np.flatnonzero(columns != self._batch_mirror)[:-1]",
    ),
    Mutation(
        "staging: new pages are written from the start of the table",
        "request_state:RequestRows.stage_pages",
        "starts = [start + diff.row * width + diff.first_idx for diff in diffs]",
        "starts = [start + diff.row * width for diff in diffs]",
    ),
    Mutation(
        "staging: one slot for all steps",
        "rings:Ring.acquire",
        "self._next_idx = (self._next_idx + 1) % len(self.slots)",
        "self._next_idx = 0",
    ),
    Mutation(
        "padding: rows with row 0",
        "request_state:RequestRows.batch_columns",
        "columns[:n], columns[n:most] = rows, self.scratch_row",
        "columns[:n], columns[n:most] = rows, 0",
    ),
    Mutation(
        "padding: token offsets with 0",
        "request_state:RequestRows.batch_columns",
        "own[: n + 1], own[n + 1 :] = starts, starts[-1]",
        "own[: n + 1], own[n + 1 :] = starts, 0",
    ),
    Mutation(
        "padding: tokens write to slot 0",
        "prepare_inputs:fill_tokens",
        "slot_mapping[total:] = -1",
        "slot_mapping[total:] = 0",
    ),
    Mutation(
        "padding: positions are left as they were",
        "prepare_inputs:fill_tokens",
        "    tokens.positions[total:] = 0\n    tokens.slot_mapping",
        "    tokens.slot_mapping",
    ),
    Mutation(
        "commit: a chunk in the middle of a prompt draws a token",
        "commit:commit",
        "draws = runs & (num_computed[own] + known == length)",
        "draws = runs",
    ),
    Mutation(
        "commit: one token beyond the limit",
        "commit:commit",
        "torch.where(takes & (length + count >= limit)",
        "torch.where(takes & (length + count > limit)",
    ),
    Mutation(
        "output: the copy stream does not wait for the step",
        "async_output:OutputRing.send",
        "device.copy_stream.wait_event(slot.computed)",
        "device.copy_stream",
    ),
    Mutation(
        "drafts: the mirror stays as if all were accepted",
        "collected_step:TokenCollector.take_each",
        "state.num_computed -= num_drafts - max(0, len(token_ids) - 1)",
        "state.num_computed -= 0",
    ),
    Mutation(
        "drafts: the mirror stays as if all were accepted where all go on",
        "collected_step:TokenCollector.take_all",
        "state.num_computed -= num_drafts + 1 - len(new)",
        "state.num_computed -= 0",
    ),
    Mutation(
        "drafts: no pages for them",
        "draft_ledger:DraftLedger.enter",
        "state.num_ahead = self._config.num_drafts + self._config.num_draft_slots",
        "state.num_ahead = self._config.num_draft_slots",
    ),
    Mutation(
        "drafts: no pages for what the drafter writes after them",
        "draft_ledger:DraftLedger.enter",
        "state.num_ahead = self._config.num_drafts + self._config.num_draft_slots",
        "state.num_ahead = self._config.num_drafts",
    ),
    Mutation(
        "drafts: pages without the drafter's keys are found",
        "draft_ledger:DraftLedger.move_in",
        "return state.num_computed if state.has_draft_gap else 0",
        "return 0",
    ),
    Mutation(
        "drafts: more of them than there are slots",
        "prepare_inputs:prepare_inputs",
        "drafts = torch.minimum(rows.num_drafts[own], max_drafts)",
        "drafts = rows.num_drafts[own]",
    ),
    Mutation(
        "drafts: one beyond the length limit",
        "place_drafts:place_drafts",
        "rows.max_total[own] - length - 1)",
        "rows.max_total[own] - length)",
    ),
    Mutation(
        "verify: a draft is accepted after a rejected one",
        "verify:accept_drafts",
        "count = is_accepted.int().cumprod(1).sum(1)",
        "count = is_accepted.int().sum(1)",
    ),
    Mutation(
        "commit: accepted drafts are computed again",
        "commit:commit",
        "known + (count - 1).clamp(min=0), 0)",
        "known, 0)",
    ),
    Mutation(
        "draft model: its first pass begins a token late",
        "draft_inputs:prepare_first_pass",
        "first_slots, computed - (planned - 1 - num_caught_up))",
        "first_slots, computed - (planned - 2 - num_caught_up))",
    ),
    Mutation(
        "draft model: the first pass does not see its last token",
        "draft_inputs:prepare_first_pass",
        "inputs.last_indices.copy_(torch.where(runs, start_loc[:-1] + query_lens - 1, 0))",
        "inputs.last_indices.copy_(torch.where(runs, start_loc[:-1], 0))",
    ),
    Mutation(
        "draft model: a draft is one position too early",
        "next_pass_inputs:prepare_next_pass",
        "position = torch.where(runs, length + idx - 1 - slots_before, 0).long()",
        "position = torch.where(runs, length + idx - 2 - slots_before, 0).long()",
    ),
    Mutation(
        "draft model: the token before the new one is not computed again",
        "draft_inputs:prepare_first_pass",
        "    sources = TokenSources(own, start_loc, inputs.query_lens, first, page_size, vocab_size)",
        "    inputs.query_lens.copy_(torch.where(runs & (planned == 2), 1, inputs.query_lens))\n"
        "    first = torch.where(planned == 2, computed, first)\n"
        "    inputs.last_indices.copy_(torch.where(runs & (planned == 2), start_loc[:-1], inputs.last_indices))\n"
        "    sources = TokenSources(own, start_loc, inputs.query_lens, first, page_size, vocab_size)",
    ),
    Mutation(
        "draft model: what ends with a step leaves no keys",
        "commit:commit",
        "rows.step_start[own] = torch.where(runs, num_computed[own] + 1, 0)",
        "rows.step_start[own] = torch.where(runs & (after == RowStatus.RUNNING), num_computed[own] + 1, 0)",
    ),
    Mutation(
        "draft model: later passes take the first draft",
        "autoregressive:AutoRegressiveSpeculator.finish",
        "last_draft = drafts[:, idx - 1]",
        "last_draft = drafts[:, 0]",
    ),
    Mutation(
        "lengths: pages of tokens that the drafter has missed count as his",
        "draft_ledger:DraftLedger.note_gaps",
        "for state in states:\n                state.has_draft_gap = True",
        "pass",
    ),
    Mutation(
        "lengths: a step with another number of drafts runs in the same graph",
        "step_graphs:StepGraphs.choose",
        "desc = self.manager.dispatch(num_reqs, num_tokens, query_len, tier, work.num_drafts, inside)",
        'proposed = self.plan.initial if tier == "fast" and batch.drafting.padded_reqs else 0\n'
        "        desc = self.manager.dispatch(num_reqs, num_tokens, query_len, tier, proposed, inside)",
    ),
    Mutation(
        "following: a launched step without drafts is not shown to the head",
        "generate_head:GenerateWork.run",
        "head.follower.run(drafted)",
        "pass",
    ),
    Mutation(
        "following: the target leaves no hidden states in a step without drafts",
        "generate_head:GenerateWork.taps",
        "return None if self.requirements.drafting is None else",
        "return None if (own := self.requirements.drafting) is None or not own.proposes else",
    ),
    Mutation(
        "notes: the head drafts without having read them",
        "head_follower:HeadFollower.catch_up",
        "self._head.follow_notes(self._noted.padded_reqs, next_power_of_2(self._noted.num_steps))",
        "pass",
    ),
    Mutation(
        "notes: one over the other",
        "draft_notes:write_notes",
        "indices = ((positions - notes.first).clamp(0, most) * n + torch.arange(n))[noted]",
        "indices = (0 * positions + torch.arange(n))[noted]",
    ),
    Mutation(
        "notes: of the token itself and not of the next one",
        "draft_notes:write_notes",
        "next_ids = torch.where(is_known, rows.token_ids[own, torch.where(is_known, positions + 1, 0)], 0)",
        "next_ids = torch.where(is_known, rows.token_ids[own, torch.where(is_known, positions, 0)], 0)",
    ),
    Mutation(
        "notes: a request's are counted on from another's",
        "draft_notes:DraftNotes.clear",
        "self._first.fill_(-1)",
        "pass",
    ),
    Mutation(
        "logits: in the order of tokens where not all decode",
        "generate_head:GenerateHead.project",
        "chosen = hidden if is_decode and len(indices) == len(hidden) else hidden.index_select(0, indices)",
        "chosen = hidden[: len(indices)]",
    ),
    Mutation(
        "checking: drafts that are there are taken for none",
        "input_batch:InputBuffers._batch",
        "are_none=shape.decode_len == 1,",
        "are_none=shape.decode_len is not None and shape.decode_len < 3,",
    ),
    Mutation(
        "gaps: of a single token they are not seen",
        "draft_gaps:mark_gaps",
        "gap = runs & (first > end)\n    if not goes_over_all",
        "gap = runs & (first > end + 1)\n    if not goes_over_all",
    ),
    Mutation(
        "gaps: attention begins a token early",
        "draft_gaps:mark_gaps",
        "torch.where(gap & (first > end), first, rows.draft_start[own])",
        "torch.where(gap & (first > end), first - 1, rows.draft_start[own])",
    ),
    Mutation(
        "gaps: keys that were drafted count as those of the tokens that came",
        "draft_gaps:mark_gaps",
        "rows.draft_end[own] = torch.where(runs, computed, end)",
        "rows.draft_end[own] = torch.where(runs, computed + 1, end)",
    ),
    Mutation(
        "gaps: what is caught up on begins a token late",
        "draft_gaps:mark_gaps",
        "first_slots.copy_(torch.where(gap, first, -1))",
        "first_slots.copy_(torch.where(gap, first + 1, -1))",
    ),
    Mutation(
        "draft graphs: the later passes are padded further than the first",
        "draft_graphs:DraftGraphs.run",
        "batch.pad(max(desc.num_reqs, rest.num_reqs) if fits else desc.num_reqs, desc.num_tokens)",
        "batch.pad(desc.num_reqs, desc.num_tokens)",
    ),
    Mutation(
        "draft graphs: a head's first pass runs in a larger graph than the target's",
        "draft_graphs:DraftGraphs._find_first",
        "if not self._passes.shares_states and not batch.num_caught_up:",
        "if not batch.num_caught_up:",
    ),
    Mutation(
        "draft graphs: a head is warmed up over the last step",
        "draft_graphs:DraftGraphs._create_first",
        "self._setting.prepare(desc)",
        "pass",
    ),
    Mutation(
        "heads: drafts are numbers of the head's own vocabulary",
        "autoregressive:AutoRegressiveSpeculator._choose",
        "noise, self._purpose, self._target_ids, drawn)",
        "noise, self._purpose, None, drawn)",
    ),
    Mutation(
        "heads: what drafts were drawn from is looked up by the target's numbers",
        "eagle:EagleSpeculator.__init__",
        "self.draft_columns.index_copy_(0, head.target_ids.long(), columns)",
        "self.draft_columns[: len(columns)] = columns",
    ),
    Mutation(
        "heads: every draft is that of the first module",
        "eagle:EagleSpeculator._next",
        "made[i] = self._head.forward(i, input_ids,",
        "made[i] = self._head.forward(0, input_ids,",
    ),
    Mutation(
        "heads: later modules have seen nothing of the prompt",
        "eagle:EagleSpeculator.forward",
        "made.append(head.forward(idx, input_ids, before, context))",
        "made.append(made[-1])",
    ),
    Mutation(
        "heads: a module goes on from the same slot",
        "eagle:EagleSpeculator.forward",
        "before = kept.index_select(0, self._slots_before[:num_tokens])",
        "before = made[-1]",
    ),
    Mutation(
        "heads: a module's first token of a step has nothing before it",
        "draft_inputs:find_slots_before",
        "torch.where(positions > seq_starts[requests], slots, 0)",
        "torch.where(torch.isin(indices, query_start_loc), 0, slots)",
    ),
    Mutation(
        "heads: modules whose turn comes again leave keys out",
        "eagle:EagleSpeculator._next",
        "first = idx if num_drafts <= len(made) else 0",
        "first = min(idx, len(made) - 1)",
    ),
    Mutation(
        "heads: the stream is taken before the final norm",
        "eagle:EagleSpeculator.__init__",
        "layers = head.taps or (NORMED,)",
        "layers = head.taps or (config.model.num_layers,)",
    ),
    Mutation(
        "heads: a page is found whatever token comes after it",
        "draft_ledger:DraftLedger.num_next_tokens",
        "return int(self._config.needs.looks_ahead)",
        "return 0",
    ),
    Mutation(
        "heads: a chunk ends without the next token",
        "draft_inputs:prepare_shifted_pass",
        "known = runs[request] & (next_position < rows.num_tokens[own][request])",
        "known = runs[request] & (next_position < rows.num_computed[own][request])",
    ),
    Mutation(
        "cascade: a page too many",
        "common_pages:count_common_pages",
        "return num_common if pays(",
        "return num_common + 1 if pays(",
    ),
    Mutation(
        "cascade: only two requests are compared",
        "common_pages:count_common_pages",
        "for state in states:\n        own",
        "for state in states[:2]:\n        own",
    ),
    Mutation(
        "cascade: a recording serves the step",
        "step_graphs:StepGraphs.choose",
        "inside = not common.num_common_pages",
        "inside = True",
    ),
    Mutation(
        "cascade: lost where the batch is padded",
        "input_batch:InputBuffers.pad",
        "num_common_pages=common.num_common_pages, num_decodes=common.num_decodes",
        "num_decodes=common.num_decodes",
    ),
    Mutation(
        "latents: lengths are read from the device",
        "mla:_find_runs",
        "starts, bounds = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound",
        "starts, bounds = common.query_start_loc_cpu, common.seq_lens.cpu().numpy()",
    ),
    Mutation(
        "latents: bounds of parts forget drafts",
        "mla:_find_runs",
        "sum(map(count_parts, bounds.tolist()))",
        "sum(map(count_parts, (bounds + 1 - np.diff(starts)).tolist()))",
    ),
    Mutation(
        "latents: bounds of chunks forget drafts",
        "mla:_cut_prompts",
        "min(WORKSPACE_KEYS, longest - begin)",
        "min(WORKSPACE_KEYS, longest - begin - 1)",
    ),
    Mutation(
        "latents: one table for all steps",
        "mla:LatentMetadata.build",
        "return cls(common, PartTables(num_programs), list(_find_runs(common)))",
        'return cls(common, globals().setdefault("made", PartTables(num_programs)), list(_find_runs(common)))',
    ),
    Mutation(
        "latents: a drafter's recording has the state of the warm-up",
        "draft_graphs:DraftGraphs._create_first",
        "pair.warmup if warmup else pair.captured",
        "pair.warmup if True else pair.captured",
    ),
    Mutation(
        "latents: tokens of later runs are counted from the first run",
        "mla:_run",
        "query_start_loc - begin if begin else query_start_loc",
        "query_start_loc",
    ),
    Mutation(
        "indexer: lengths are read from the device",
        "sparse_mla:SparseLatentStep.choose",
        "at_once = max(1, WORKSPACE_SCORES // run.max_keys)",
        "at_once = max(1, WORKSPACE_SCORES // int(run.requests.seq_lens.max()))",
    ),
    Mutation(
        "indexer: bounds forget drafts",
        "sparse_mla:SparseLatentStep.choose",
        "sizes = (run.max_keys,",
        "sizes = (run.max_keys + 1 - run.max_query_len,",
    ),
    Mutation(
        "indexer: a piece of the tokens has the queries of the first",
        "sparse_mla:SparseLatentStep.choose",
        "IndexQueries(q[tokens], weights[tokens])",
        "IndexQueries(q[: tokens.stop - first], weights[tokens])",
    ),
    Mutation(
        "pooling: vectors are read before they are there",
        "pool_head:_PooledStep.collect",
        "self.slot.event.synchronize()",
        "pass",
    ),
    Mutation(
        "pooling: the copy does not wait for the step",
        "pool_head:PoolHead.send",
        "device.copy_stream.wait_event(slot.computed)",
        "pass",
    ),
    Mutation(
        "pooling: the next step's vectors take the way of this one's",
        "pool_head:PoolHead.send",
        "slot.vectors.stage(vectors)",
        "slot.vectors.on_device = self._out",
    ),
    Mutation(
        "pooling: a vector of another row",
        "pool_head:_PooledStep.collect",
        "else found[i - self.span.first, :size]",
        "else found[0, :size]",
    ),
    Mutation(
        "pooling: sums of another row",
        "pool:pool",
        "total = own.sum(0) if position == 0 else kept[row] + own.sum(0)",
        "total = own.sum(0) if position == 0 else kept[0] + own.sum(0)",
    ),
    Mutation(
        "pooling: a mean forgets the chunks before",
        "pool:pool",
        "total = own.sum(0) if position == 0 else kept[row] + own.sum(0)",
        "total = own.sum(0)",
    ),
    Mutation(
        "pooling: a mean goes on from the row's last request",
        "pool:pool",
        "total = own.sum(0) if position == 0 else kept[row] + own.sum(0)",
        "total = kept[row] + own.sum(0)",
    ),
    Mutation(
        "pooling: a mean begins with cached pages",
        "pooling:PoolingParams.needs_every_position",
        "return self.kind is not PoolingKind.LAST",
        "return False",
    ),
    Mutation(
        "masks: of the position before",
        "walk:GrammarWalk._visit_drafts",
        "[walker.visit.first_logit + depth for walker in walking]",
        "[walker.visit.first_logit + max(0, depth - 1) for walker in walking]",
    ),
    Mutation(
        "masks: drafts before a request are not counted",
        "constraints:Constraints.begin",
        "start += 1 + num_drafts",
        "start += 1",
    ),
    Mutation(
        "masks: a row of the pool keeps its old mask",
        "token_masks:MaskStore.stage",
        "if num_new:",
        "if num_new > 1:",
    ),
    Mutation(
        "masks: a mask that was written over counts as there",
        "mask_pool:MaskPool.place",
        "known.popitem(last=False)[1]",
        "next(iter(known.values()))",
    ),
    Mutation(
        "masks: a matcher does not go back after drafts",
        "walk:GrammarWalk.go",
        "matcher.rollback(walker.num_passed)",
        "pass",
    ),
    Mutation(
        "masks: a matcher goes back too far",
        "walk:GrammarWalk.go",
        "matcher.rollback(walker.num_passed)",
        "matcher.rollback(min(1, len(walker.visit.new)) + walker.num_passed)",
    ),
    Mutation(
        "masks: the drafts of the step before",
        "constraints:Constraints.note_result",
        "state.drafts = () if result.next_drafts is None else result.next_drafts[i]",
        "state.drafts = state.drafts or (() if result.next_drafts is None else result.next_drafts[i])",
    ),
    Mutation(
        "masks: filled before the steps before are collected",
        "core:EngineCore._launch",
        "constraints is not None and not self._in_flight and constraints.concern(plan)",
        "constraints is not None and constraints.concern(plan)",
    ),
    Mutation(
        "masks: another step is launched between the halves of one",
        "core:EngineCore._release_oldest",
        "if not isinstance(held := self._in_flight[0], HeldStep):\n            return False",
        "if not isinstance(held := self._in_flight[0], HeldStep):\n            return True",
    ),
    Mutation(
        "masks: the copy's memory is free before the step is done",
        "runner:Runner._release",
        "self.masks.release()",
        "pass",
    ),
    Mutation(
        "masks: the end comes before the minimum",
        "walk:GrammarWalk._hold_back_ends",
        "if visit.num_output + walker.num_passed < params.min_tokens:",
        "if visit.num_output < params.min_tokens:",
    ),
    Mutation(
        "masks: certain tokens are one position further",
        "place_certain_drafts:place_certain_drafts",
        "slots = (length.unsqueeze(1) + idx).clamp(",
        "slots = (length.unsqueeze(1) + 1 + idx).clamp(",
    ),
    Mutation(
        "masks: certain tokens of another request",
        "token_masks:MaskStore._fill_runs",
        "for run in runs:",
        "for run in [run._replace(place=run.place - 1) for run in runs]:",
    ),
    Mutation(
        "masks: certain tokens after any number of accepted drafts",
        "place_certain_drafts:place_certain_drafts",
        "ready & (runs[:, 0] == num_accepted)",
        "ready & (runs[:, 0] >= 0)",
    ),
    Mutation(
        "masks: no certain tokens after accepted drafts",
        "walk:GrammarWalk.follow_certain",
        "if w.visit.num_next and (token_id := only_token(w.mask)) is not None]",
        "if w.visit.num_next and (token_id := only_token(w.mask)) is not None and not w.num_accepted]",
    ),
    Mutation(
        "pooling: a text of an encoder comes in pieces",
        "admission:Admission._add_prefill",
        "if self._config.whole_prompts and num_tokens > fitting:",
        "if False:",
    ),
    Mutation(
        "pooling: an encoder's text is admitted to a step without room for it",
        "admission:Admission._admit",
        "if self._config.whole_prompts and len(state.token_ids) > room.tokens:",
        "if False:",
    ),
    Mutation(
        "micro-batches: the first half of a cut request keeps its whole length",
        "micro_batches:_cut_request",
        "seq_lens[-1:] -= num_left",
        "seq_lens[-1:] -= 0",
    ),
    Mutation(
        "micro-batches: the second half goes over the first one's tokens",
        "micro_batches:_cut_request",
        "lens_after[:1] = num_left",
        "lens_after[:1] = after.query_lens[:1]",
    ),
    Mutation(
        "micro-batches: unused slots of drafts shorten the bound",
        "micro_batches:_cut_request",
        "bounds[-1] -= max(0, tokens_skipped - num_drafts)",
        "bounds[-1] -= tokens_skipped",
    ),
    Mutation(
        "micro-batches: the second half writes into the first one's slots",
        "micro_batches:_slice",
        "slot_mapping=common.slot_mapping[tokens],",
        "slot_mapping=common.slot_mapping[:num_tokens],",
    ),
    Mutation(
        "micro-batches: the second half reads pages of the first one's requests",
        "micro_batches:_slice",
        "block_table=common.block_table[own],",
        "block_table=common.block_table[: end - begin],",
    ),
    Mutation(
        "micro-batches: states of the first half's rows",
        "micro_batches:_slice",
        "batch_rows=part(common.batch_rows),",
        "batch_rows=None if common.batch_rows is None else common.batch_rows[: end - begin],",
    ),
    Mutation(
        "micro-batches: encoders' texts are cut",
        "micro_batches:whole_prompt_reason",
        'return next((spec.whole_prompts for spec in specs if spec.whole_prompts), "")',
        'return ""',
    ),
    Mutation(
        "blocks: a rejected draft stays in the context",
        "block_inputs:prepare_blocks",
        "torch.where(runs, num_tokens - 1 + query_lens, 0)",
        "torch.where(runs, torch.maximum(num_tokens - 1 + query_lens, rows.step_start[own] + length), 0)",
    ),
    Mutation(
        "blocks: masks are one position further",
        "block_inputs:prepare_blocks",
        "torch.where(exists, num_tokens.unsqueeze(1) - 1 + idx, 0)",
        "torch.where(exists, num_tokens.unsqueeze(1) - 1 + idx + (idx > 0), 0)",
    ),
    Mutation(
        "blocks: drafts come from the place before",
        "dflash:DFlashSpeculator.finish",
        "first = shape.length - shape.num_places",
        "first = shape.length - shape.num_places - 1",
    ),
    Mutation(
        "blocks: states of another step",
        "dflash:DFlashSpeculator.taps",
        "part[:num_tokens] for",
        "part[:num_tokens].clone() for",
    ),
    Mutation(
        "blocks: no slot for the newest token",
        "speculate/methods/dflash.py",
        "extra_slots=1,",
        "extra_slots=0,",
    ),
    Mutation(
        "blocks: bounds forget the block",
        "dflash:DFlashSpeculator._contexts",
        "np.minimum(batch.seq_lens_bound + length - 1, self._max_len)",
        "np.minimum(batch.seq_lens_bound, self._max_len)",
    ),
    Mutation(
        "blocks: tokens see only what is before them",
        "dflash:DFlashSpeculator._contexts",
        "replace(common, is_causal=is_causal)",
        "replace(common, is_causal=True)",
    ),
    Mutation(
        "blocks: what is before a gap is read",
        "dflash:DFlashSpeculator._contexts",
        "seq_starts=self._gaps.seq_starts[:num_reqs],",
        "seq_starts=torch.zeros_like(self._gaps.seq_starts[:num_reqs]),",
    ),
]


def find(mutation: Mutation, num_seeds: int, kind: str = "") -> str:
    """What the simulator says of the changed tree; empty if nothing."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in ("slipstream", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        path, text = plant(mutation)
        (Path(folder) / path).write_text(text)
        command = [sys.executable, "-m", "tests.sim", "--seeds", str(num_seeds), "--jobs", "1", "--stop"]
        command += [f"--{kind}"] if kind else []
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        found = re.search(r"^seed (\d+): (.*)$", ran.stdout, re.MULTILINE)
        if ran.returncode and not found:
            raise SystemExit(f"{mutation.name}: the simulator itself failed\n{ran.stderr}")
        return f"seed {found[1]} | {found[2][:90]}" if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--kind", default="", help="of the model in every world: an option of the simulator, as cross")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutation, found in zip(
            chosen, pool.map(lambda m: find(m, options.seeds, options.kind), chosen), strict=True
        ):
            missed += not found
            print(f"| {mutation.name} | {found or 'NOT FOUND |'} |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found within {options.seeds} seeds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
