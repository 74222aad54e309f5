"""Small tokenizers with the settings of published ones, for tests that have the package tokenizers."""
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers


def trained(texts, *pre, unigram=False, normalizer=None, decoder=None):
    """Returns a tokenizer of these texts, with <s> and </s> around what it encodes."""
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Sequence(list(pre)) if pre[1:] else pre[0], normalizer
    tokenizer.decoder = decoder or (decoders.ByteLevel() if isinstance(pre[-1], pre_tokenizers.ByteLevel) else decoders.Metaspace())
    how = {"vocab_size": 600, "special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.UnigramTrainer(**how, unk_token="<unk>") if unigram else trainers.BpeTrainer(**how))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def llama2(texts):
    """Returns one like Llama 2's: no pre-tokenizer, an underscore for each space and before the text, bytes of what is unknown."""
    before = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    after = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    data = json.loads(trained(texts, pre_tokenizers.Metaspace(), normalizer=before, decoder=after).to_str())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    return Tokenizer.from_str(json.dumps(data | {"pre_tokenizer": None, "model": data["model"] | {"byte_fallback": True, "fuse_unk": True}}))
