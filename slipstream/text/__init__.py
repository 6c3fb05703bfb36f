"""Text and tokens: tokenizers, chat templates, detokenizing."""
