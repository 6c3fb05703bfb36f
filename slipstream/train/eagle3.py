"""Training an EAGLE-3 head: its draft vocabulary, the network, its files."""

from __future__ import annotations

import torch

from slipstream.train.export import default_taps, plan_head, write_head
from slipstream.train.head import TrainableHead, widen
from slipstream.train.session import Report, Session, open_session
from slipstream.train.settings import TrainSettings
from slipstream.train.target import TargetModel, padded_length
from slipstream.train.trainer import Progress
from slipstream.train.vocabulary import DraftVocabulary, choose_vocabulary, coverage


def train_eagle3(settings: TrainSettings, report: Report) -> Progress:
    session = open_session(settings, report, default_taps)
    vocabulary, covered = _vocabulary(settings, session)
    head = make_head(settings, session.target_model, vocabulary)
    progress = session.train(head)
    write_head(
        session.out,
        head,
        vocabulary,
        session.target,
        format=settings.format,
        dtype=session.target_model.dtype,
        verifier=settings.model,
        num_drafts=settings.draft_steps,
    )
    chosen = {"size": len(vocabulary.target_ids), "coverage": covered}
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    session.write_about("eagle3", "EAGLE-3", num_parameters, progress, vocabulary=chosen)
    return progress


def make_head(settings: TrainSettings, target_model: TargetModel, vocabulary: DraftVocabulary) -> TrainableHead:
    """The head with its initial weights, in float32 at least."""
    plan = plan_head(target_model.config, len(vocabulary.target_ids), target_model.dtype)
    max_position = padded_length(settings.max_len) + settings.draft_steps
    target_ids = vocabulary.target_ids.to(target_model.device)
    head = TrainableHead(plan, target_model.embedding, target_ids, max_position, settings.draft_steps)
    head = widen(head.to(target_model.device), target_model.dtype)
    head.initialise(target_model.head, target_model.model.model.norm.weight, target_model.last_layer, settings.seed)
    return head


def _vocabulary(settings: TrainSettings, session: Session) -> tuple[DraftVocabulary, float]:
    """The draft vocabulary, and the share of held-out tokens that it covers."""
    texts, eos = session.texts, session.checkpoint.tokenizer().eos_token_id
    trained = torch.cat([texts.tokens_of(idx) for idx in texts.where(held_out=False).tolist()])
    always = () if eos is None else (eos,)
    vocabulary = choose_vocabulary(trained, session.target.vocab_size, settings.draft_vocab, always)
    unseen = torch.cat([texts.tokens_of(idx) for idx in texts.where(held_out=True).tolist()])
    covered = coverage(vocabulary, unseen)
    session.report.say(
        f"{len(texts.lengths):,} texts, {len(texts.token_ids):,} tokens; the {len(vocabulary.target_ids):,} most "
        f"frequent are {covered:.1%} of held-out texts"
    )
    return vocabulary, covered
