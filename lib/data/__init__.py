"""Parquet and JSON lines to prompts: checks, chat template, lengths, one date, and their seeded order."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    chat_template="ChatTemplate",
    parquet="write_rows",
    prompt_stream="PromptStream",
    prompts="DataConfig DataFiles Prompts check_data_files tokenize",
    reading="read_rows",
    rows="Rows",
    tokenizer="decode load_tokenizer stop_token_ids",
)
