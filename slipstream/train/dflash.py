"""Training a DFlash head: the token whose embedding masks have, the network, its files."""

from __future__ import annotations

import torch

from slipstream.errors import ConfigError
from slipstream.train.block_export import default_block_taps, plan_block_head, write_block_head
from slipstream.train.block_head import TrainableBlockHead
from slipstream.train.data import Texts
from slipstream.train.head import widen
from slipstream.train.session import Report, open_session
from slipstream.train.settings import BlockSettings
from slipstream.train.target import TargetModel, padded_length
from slipstream.train.trainer import Progress


def train_dflash(settings: BlockSettings, report: Report) -> Progress:
    session = open_session(settings, report, default_block_taps)
    head = make_block_head(settings, session.target_model, session.texts)
    progress = session.train(head)
    target_model = session.target_model
    write_block_head(session.out, head, session.target, settings, target_model.dtype, target_model.head)
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    session.write_about("dflash", "DFlash", num_parameters, progress)
    return progress


def make_block_head(settings: BlockSettings, target_model: TargetModel, texts: Texts) -> TrainableBlockHead:
    """The head with its initial weights, in float32 at least."""
    mask_id = unused_token(texts, target_model.config.vocab_size)
    plan = plan_block_head(target_model.config, settings, mask_id, target_model.dtype)
    max_position = padded_length(settings.max_len) + settings.block_size
    head = TrainableBlockHead(plan, target_model.embedding, max_position, settings.anchors).to(target_model.device)
    head = widen(head, target_model.dtype)
    head.initialise(target_model.model.model.norm.weight, settings.seed)
    return head


def unused_token(texts: Texts, vocab_size: int) -> int:
    """The last token that no text has: masks have its embedding."""
    unused = torch.bincount(texts.token_ids.long(), minlength=vocab_size)[:vocab_size] == 0
    if not bool(unused.any()):
        raise ConfigError("the texts have every token of the vocabulary; none is left for masks")
    return int(unused.nonzero().max())
