"""Text in, ids out, and back: tokenizer, chat template, incremental detokenizer."""
