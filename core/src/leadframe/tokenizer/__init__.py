"""Text and token ids: encoding, chat templates, incremental decoding, stop strings."""

from leadframe.tokenizer.detokenizer import Detokenizer
from leadframe.tokenizer.load import load_tokenizer
from leadframe.tokenizer.stop_checker import StopChecker
from leadframe.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopChecker", "Tokenizer", "load_tokenizer"]
