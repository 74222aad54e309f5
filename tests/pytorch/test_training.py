#!/usr/bin/env python3
"""tools/torch in training: Hugging Face's models, DDP and FSDP2, and the README's examples."""
import concurrent.futures
import copy
import inspect
import io
import itertools
import math
import os
import re
import socket
import tempfile
import types
import warnings

from setting import DEVICE, all_close, calls_of_the_operator, close, raises, readme_examples, run, torch
from tap import Skip

if torch:
    import torch.distributed as dist
    import torch.distributed.tensor
    import lce

try:
    import transformers
except ImportError:
    transformers = None

def module(name):
    """A package that these tests can do without."""
    try:
        return __import__(name)
    except ImportError:
        raise Skip(f"there is no {name}") from None


SIZES = dict(vocab_size=211, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32)
GPT2 = dict(vocab_size=211, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
# Lists what is special in a model_type: soft-caps and scales of its logits, another loss, biases, tied heads.
FAMILIES = dict(gpt2={}, llama={}, mistral={}, qwen2={}, qwen3={}, gemma2=dict(head_dim=8, final_logit_softcapping=2.0),
                gemma3_text=dict(head_dim=8, final_logit_softcapping=3.0), phi3=TOKENS, olmo2={}, smollm3=TOKENS,
                granite=dict(logits_scaling=8.0), cohere=dict(logit_scale=0.25), glm=dict(head_dim=8, **TOKENS),
                qwen3_moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, output_router_logits=True))


def model_of(kind, **more):
    if not transformers:
        raise Skip("there is no transformers")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **{**(GPT2 if kind == "gpt2" else SIZES), **more})
    model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE)
    if more.keys() & {"final_logit_softcapping", "logits_scaling", "logit_scale"}:  # so that these change the loss
        model.get_output_embeddings().weight.data.normal_()
    return model


def batch_of(step):
    """Tokens that can be learned; some labels do not count."""
    first = torch.randint(0, 211, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = ((first + torch.arange(16) * torch.tensor([[1], [2], [3], [4]])) % 211).to(DEVICE)
    labels = tokens.clone()
    labels[0, :5] = -100
    return dict(input_ids=tokens, labels=labels)


def curve(model, steps=50):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        more = dict(num_items_in_batch=torch.tensor(59, device=DEVICE)) if step % 2 else {}
        loss = model(**batch_of(step), **more).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def curves_are_equal(kind, **more):
    model = model_of(kind, **more)
    patched = lce.patch_transformers(copy.deepcopy(model), chunk=24)
    want, got = curve(model), curve(patched)
    assert want[-5:].mean() < 0.8 * want[:5].mean(), want
    close(f"the losses of {kind}", got, want, 1e-4)


def all_models():
    """Loss, gradients and calls of every family."""
    for kind, special in FAMILIES.items():
        model = model_of(kind, **special)
        patched = lce.patch_transformers(copy.deepcopy(model))
        batch = batch_of(0)
        for more in ({}, dict(num_items_in_batch=7), dict(return_dict=False)):
            def results(m):
                loss = m(**batch, **more)[0]
                ends = m.base_model.get_input_embeddings().weight, m.get_output_embeddings().weight
                return loss, *torch.autograd.grad(loss, ends)
            all_close(f"{kind} {more}", results(patched), results(model), 2e-5)
        output, whole = patched(**batch), model(**batch)
        assert output.logits is None and output.keys() == whole.keys() - {"logits"} and type(output) is type(whole)
        assert torch.equal(patched(**batch, return_logits=True).logits, whole.logits)
        plain = patched(input_ids=batch["input_ids"])
        assert plain.loss is None and torch.equal(plain.logits, model(input_ids=batch["input_ids"]).logits)
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        close("shift_labels", patched(batch["input_ids"], shift_labels=shifted).loss, output.loss, 1e-6)
        assert torch.equal(*(m.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, use_cache=False)
                             for m in (patched, model)))
        assert patched.state_dict().keys() == model.state_dict().keys() and isinstance(patched, type(model))
        assert inspect.signature(patched.forward) == inspect.signature(model.forward)
        assert patched._get_name() == model._get_name()
        if kind == "cohere":  # also where there are no values to compare
            with torch.device("meta"):
                meta = lce.patch_transformers(transformers.AutoModelForCausalLM.from_config(model.config))
            assert meta.lce_patch.options["temperature"] == 4


def evaluation():
    """In evaluation no option acts on the loss; without gradients logits come, unless they are not wanted."""
    options = dict(label_smoothing=0.3, z_loss=0.1, class_weights=torch.rand(211, device=DEVICE), chunk=8)
    model, batch = model_of("llama"), batch_of(0)
    patched = lce.patch_transformers(copy.deepcopy(model), **options)
    assert patched.training and abs(patched(**batch).loss - model(**batch).loss) > 0.01
    want = model.eval()(**batch)
    patched.eval()
    close("with gradients", patched(**batch).loss, want.loss, 1e-6)
    assert patched(**batch).logits is None
    with torch.no_grad():
        close("logits", patched(**batch).logits, want.logits, 1e-6)
        for without in (dict(return_logits=False), {}):
            output = patched(**batch, **without)
            assert output.logits is None
            close("evaluation", output.loss, want.loss, 1e-6)
            lce.patch_transformers(patched, return_logits=False)


def smoothing_under_a_softcap():
    model, batch = model_of("gemma2", head_dim=8, final_logit_softcapping=2.0), batch_of(0)
    patched = lce.patch_transformers(copy.deepcopy(model), label_smoothing=0.1, chunk=24)
    logits, labels = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    close("smoothed", patched(**batch).loss, torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1), 1e-5)


def training_without_labels():
    """It warns, for it takes the logits of all tokens, as Trainer(label_smoothing_factor=...) has it."""
    patched, tokens = lce.patch_transformers(model_of("llama")), batch_of(0)["input_ids"]

    def warned(call):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return any("in place of Trainer(label_smoothing_factor=...) give patch_transformers(label_smoothing=...)" in str(w.message)
                   for w in caught)
    assert warned(lambda: patched(tokens))
    assert not warned(lambda: patched(tokens, return_logits=True)) and not warned(lambda: patched(tokens, labels=tokens))
    assert not warned(torch.no_grad()(lambda: patched(tokens))) and not warned(lambda: patched.eval()(tokens))


def copies():
    """Copies stay patched, whatever made them, and compute by their own parameters."""
    def saved(model):
        file = io.BytesIO()
        torch.save(model, file)
        return file.seek(0) or torch.load(file, weights_only=False)
    batch = batch_of(0)
    for copied in (copy.copy, copy.deepcopy, saved):
        model = lce.patch_transformers(model_of("gemma2", head_dim=8, final_logit_softcapping=2.0), z_loss=0.01)
        again = copied(model)
        close(copied.__name__, again(**batch).loss, model(**batch).loss, 1e-7)
        assert again(**batch).logits is None and again.forward.__self__ is again
        again.lm_head = copy.deepcopy(again.lm_head)
        again.lm_head.weight.data.zero_()
        with torch.no_grad():
            close("its own head", again.eval()(**batch).loss, torch.tensor(math.log(211), device=DEVICE), 1e-5)


def odd_model(**changes):
    """A Llama with a forward of its own, which changes labels before the head, logits, labels after, or the loss."""
    llama = model_of("llama")

    class Odd(type(llama)):
        def forward(self, input_ids, labels=None, **kwargs):
            labels, kwargs = self.before(labels, kwargs)
            logits = self.change(self.lm_head(self.model(input_ids).last_hidden_state))
            labels, kwargs = self.after(labels, kwargs)
            loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)
    odd = Odd(llama.config).to(DEVICE)
    odd.before = odd.after = lambda labels, kwargs: (labels, kwargs)
    odd.change = lambda logits: logits
    for name, change in changes.items():
        setattr(odd, name, change)
    return odd


def models_that_are_refused():
    """Refuses them with a sentence, and leaves them as they were."""
    llama = model_of("llama")
    cross_entropy = torch.nn.functional.cross_entropy
    losses = (lambda z, y, **_: cross_entropy(z.flatten(0, 1), y.flatten()),
              lambda z, y, **_: cross_entropy(z.flatten(0, 1)[:-1], y.flatten()[1:]),
              lambda z, y, **_: cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten(), label_smoothing=0.01))
    for told, change in (("it does more to its logits than", dict(change=lambda z: z.clamp(-5, 5))),
                         ("it does more to its logits than", dict(change=lambda z: -z)),
                         ("does not give the head's logits", dict(change=lambda z: z[..., :100])),
                         *((r"its loss_function makes \d.* of known logits, not \d", dict(loss_function=loss)) for loss in losses)):
        odd = odd_model(**change)
        own = type(odd)
        said = raises(TypeError, "a Odd cannot be patched", lambda: lce.patch_transformers(odd))
        assert re.search(told, said), said
        assert type(odd) is own and type(odd.lm_head) is torch.nn.Linear and odd.training
    odd = odd_model()
    odd.after = lambda labels, kwargs: (labels, dict(kwargs, weighted=True) if odd.training else kwargs)
    raises(TypeError, "gives its loss_function other keywords, in training", lambda: lce.patch_transformers(odd))
    for options, told in ((dict(smoothing=0.1), "'smoothing' is no option of patch_transformers; these are: chunk"),
                          (dict(reduction="sum"), "'reduction' is no option"), (dict(chunk=-1), "a chunk of -1"),
                          (dict(label_smoothing=7.0), "label_smoothing is 7")):
        raises(TypeError, told, lambda: lce.patch_transformers(llama, **options))
    raises(TypeError, "a Sequential is no model of transformers; patch the one inside",
           lambda: lce.patch_transformers(torch.nn.Sequential(llama)))
    llama.forward = types.MethodType(type(llama).forward, llama)
    raises(TypeError, "cannot be patched", lambda: lce.patch_transformers(llama))
    assert type(llama) is type(model_of("llama")) and type(llama.lm_head) is torch.nn.Linear
    del llama.forward
    t5gemma = dict(SIZES, head_dim=8, **TOKENS)
    config = transformers.T5GemmaConfig(encoder=t5gemma, decoder=dict(t5gemma), vocab_size=211)
    unshifted = transformers.T5GemmaForConditionalGeneration(config)
    raises(TypeError, "its loss_function makes", lambda: lce.patch_transformers(unshifted))


def forwards_that_change_what_they_hand_on():
    """The patched loss is the unpatched one, or TypeError, or NaN where code is compiled."""
    def masked(labels, kwargs):
        return labels.masked_fill(labels > 99, -100), kwargs

    def masked_in_place(labels, kwargs):
        return labels.masked_fill_(labels > 99, -100), kwargs

    def few_items(labels, kwargs):
        return labels, {name: 3 if value == 59 else value for name, value in kwargs.items()}

    def shifted(labels, kwargs):
        return labels, dict(kwargs, shift_labels=torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100))

    def both(when, change):
        plain = odd_model(**{when: change})
        return lce.patch_transformers(copy.deepcopy(plain)), plain
    tokens, items = batch_of(1)["input_ids"], dict(num_items_in_batch=59)
    for case in (("before", masked_in_place), ("after", shifted), ("after", lambda labels, kwargs: (labels, {})),
                 ("after", lambda labels, kwargs: (labels.clone(), dict(ignore_index=0)))):
        for models, more in itertools.product([both(*case)], ({}, items)):
            close(f"{case} {more}", *(m(tokens, labels=tokens.clone(), **more).loss for m in models), 1e-5)
    patched, _ = both("after", few_items)
    raises(TypeError, "other num_items_in_batch than", lambda: patched(tokens, labels=tokens, **items))
    def is_nan(model):
        loss = model(tokens, labels=tokens.clone()).loss
        assert loss.isnan() and torch.autograd.grad(loss, patched.lm_head.weight)[0].isnan().all()
    for when, change in ("before", masked), ("after", masked), ("after", masked_in_place):
        patched, _ = both(when, change)
        if DEVICE == "cuda":
            is_nan(patched)
            continue
        for name in ("labels", *["shift_labels"] * (change is masked_in_place)):
            raises(TypeError, "other labels than", lambda: patched(tokens, **{name: tokens.clone()}, **items))
    is_nan(torch.compile(patched, backend="aot_eager"))


def logits_that_change_after_the_patch():
    """TypeError, and NaN in compiled code and on a GPU, but for what the host knows without waiting."""
    batch = batch_of(0)

    def noticed(model, told, waits=False):
        patched, is_nan = model if hasattr(model, "lce_patch") else lce.patch_transformers(model), DEVICE == "cuda" and waits
        if is_nan:
            assert patched(**batch).loss.isnan()
        else:
            raises(TypeError, told, lambda: patched(**batch))
        if waits:
            assert torch.compile(patched, backend="aot_eager")(**batch, use_cache=False).loss.isnan()
    for kind, name, special in (("gemma2", "final_logit_softcapping", FAMILIES["gemma2"]), ("granite", "logits_scaling", FAMILIES["granite"])):
        for value in (None, 1.1) if kind == "gemma2" else (7.0,):
            model = lce.patch_transformers(model_of(kind, **special))
            setattr(model.config, name, value)
            noticed(model, "other logits than the patch expects", True)
            assert lce.patch_transformers(model)(**batch).loss.isfinite()
    model = lce.patch_transformers(model_of("cohere", logit_scale=0.25))
    model.logit_scale = 0.26
    noticed(model, "other logits than", True)
    model = lce.patch_transformers(model_of("llama"))
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    noticed(model, "other logits than", True)
    handle.remove()
    assert model(**batch).loss.isfinite()
    for learned in (torch.ones(()), torch.zeros(211)):
        model, parameter = odd_model(), torch.nn.Parameter(learned.to(DEVICE))
        model.change = lambda z: z * parameter if parameter.dim() == 0 else z + parameter
        noticed(model, "a parameter of its forward acts on logits")
    model = odd_model()
    model.change = lambda z: z / (2 if model.training else 1)
    raises(TypeError, "something else to its logits, or gives its loss_function other keywords, in training",
           lambda: lce.patch_transformers(model))

    def weighted(logits, labels, vocab_size, loss_weights=1.0, **more):
        return loss_weights * transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **more)
    model = odd_model(loss_function=weighted)
    lce.patch_transformers(model)
    model.after = lambda labels, kwargs: (labels, dict(kwargs, loss_weights=2.0))
    raises(TypeError, "its forward gives its loss_function loss_weights, which the patch does not know",
           lambda: model(batch["input_ids"], labels=batch["labels"]))
    model = lce.patch_transformers(model_of("llama"))
    close("an unused keyword", model(**batch, cu_seq_lens_q=None).loss, model(**batch).loss, 1e-7)
    liger = types.FunctionType((lambda self: 0).__code__, {"__name__": "liger_kernel.transformers.model.llama"})
    raises(TypeError, "choose one of Trainer(use_liger_kernel=True) and lce.patch_transformers",
           lambda: setattr(model, "forward", types.MethodType(liger, model)))


def threads():
    """Several call one patched model at the same time."""
    model, batches = lce.patch_transformers(model_of("llama")), [batch_of(step) for step in range(4)]
    want = [model(**batch).loss.item() for batch in batches]

    def losses(i):
        return [model(**batches[i]).loss.item() for _ in range(10)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for w, got in zip(want, pool.map(losses, range(4))):
            assert all(abs(loss - w) < 1e-5 for loss in got), (w, got)


def after_the_patch():
    """Other losses and heads, tuples, and unpatch_transformers."""
    model, batch = model_of("llama"), batch_of(0)
    patched = lce.patch_transformers(copy.deepcopy(model), z_loss=0.0)

    def half(logits, labels, **more):
        return logits.sum() / 2
    whole, got = model(**batch, return_dict=False), patched(**batch, return_dict=False)
    assert len(got) == len(whole) and got[1] is None and type(got[2]) is type(whole[2])
    raises(TypeError, "call lce.unpatch_transformers(model) before", lambda: setattr(patched, "loss_function", half))
    patched._loss_function = half
    raises(TypeError, "its loss_function is not the one that was patched", lambda: patched(**batch))
    raises(TypeError, "cannot be patched: its loss_function makes", lambda: lce.patch_transformers(patched))
    del patched._loss_function
    close("as before", patched(**batch).loss, whole[0], 1e-6)
    unpatched = lce.unpatch_transformers(copy.deepcopy(patched))
    assert [type(m) for m in unpatched.modules()] == [type(m) for m in model.modules()]
    assert vars(unpatched).keys() == vars(model).keys() and torch.equal(unpatched(**batch).logits, model(**batch).logits)
    unpatched.loss_function = half
    close("another loss", unpatched(**batch).loss, model(**batch).logits.sum() / 2, 1e-6)
    for change in (lambda m: m.resize_token_embeddings(220),
                   lambda m: setattr(m, "lm_head", torch.nn.Linear(32, 220, device=DEVICE))):
        for both in patched, model:
            torch.manual_seed(3)
            change(both)
        close("another head", *(m(**batch).loss for m in (patched, model)), 1e-6)
    assert patched(**batch).logits is None and lce.patch_transformers(patched)(**batch).logits is None
    patched.lm_head = torch.nn.Linear(32, 230, device=DEVICE)
    raises(TypeError, "other vocab_size than the patch", lambda: patched(**batch))


def peft_models():
    """An adapter inside, and a copied head, patched before and after; an adapter on the head is refused."""
    peft, batch = module("peft"), batch_of(0)

    def adapted(model, **config):
        torch.manual_seed(2)
        return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config))

    def results(model):
        loss = model(**batch).loss
        return loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    for config in (dict(target_modules=["q_proj"]), dict(target_modules=["q_proj"], modules_to_save=["lm_head"])):
        want = results(adapted(model_of("llama"), **config))
        patched = lce.patch_transformers(adapted(model_of("llama"), **config))
        for model in (patched, adapted(lce.patch_transformers(model_of("llama")), **config)):
            all_close(f"{config}", results(model), want, 2e-5)
            assert model(**batch).logits is None
    on_head, llama = dict(target_modules=["q_proj", "lm_head"]), lce.patch_transformers(model_of("llama"))
    model, whole = (adapted(m, **on_head).eval() for m in (llama, model_of("llama")))
    with torch.no_grad():
        close("evaluation of an adapted head", model(**batch).loss, whole(**batch).loss, 1e-6)
    for call in (lambda: model.train()(**batch), lambda: lce.patch_transformers(whole)):
        raises(TypeError, "its head is a peft.tuners.lora.layer.Linear, and must be an nn.Linear that no adapter targets", call)


def trainers():
    """Trainer gets the logits that it needs, TRL's a sentence; accelerate's hooks call the patch."""
    accelerate, batch = module("accelerate"), batch_of(0)
    data = [{name: t[i].cpu() for name, t in batch.items()} for i in range(4)]

    def evaluated(model):
        shapes = []
        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                model, transformers.TrainingArguments(folder, report_to=[], disable_tqdm=True, bf16=True, max_steps=1,
                                                      use_cpu=DEVICE == "cpu", per_device_train_batch_size=4),
                train_dataset=data, eval_dataset=data, compute_metrics=lambda p: shapes.append(p.predictions.shape) or {})
            return trainer.evaluate()["eval_loss"], trainer.train().training_loss, shapes
    with calls_of_the_operator() as calls:
        want, got = evaluated(model_of("llama")), evaluated(lce.patch_transformers(model_of("llama")))
    all_close("Trainer", *(torch.tensor(losses[:2]) for losses in (got, want)), 1e-3)
    assert got[2] == want[2] == [(4, 16, 211)] and calls
    spread = accelerate.dispatch_model(model_of("llama"), {"": DEVICE}, force_hooks=True)
    want = spread(**batch).loss
    output = lce.patch_transformers(spread)(**batch)
    close("with hooks", output.loss, want, 1e-5)
    assert output.logits is None
    if hasattr(module("trl").trainer, "add_fused_lm_head"):  # which SFTTrainer and others call
        raises(TypeError, "TRL's trainers put a loss of their own into a model",
               lambda: module("trl").trainer.add_fused_lm_head(lce.patch_transformers(model_of("llama"))))


def compiled_model():
    model = lce.patch_transformers(model_of("llama"))
    batch = batch_of(0)
    want = model(**batch, use_cache=False).loss
    close("compiled", torch.compile(model, fullgraph=True, backend="aot_eager")(**batch, use_cache=False).loss, want, 1e-5)


class Net(torch.nn.Module if torch else object):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 16)
        self.head = lce.LinearCrossEntropy(16, 64)

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.embedding(tokens[:, :-1]))), tokens[:, 1:])


STEPS = 5


def trained(net, loss_of, rank, ranks):
    """The parameters after a few steps on this rank's part of the batches."""
    optimizer, device = torch.optim.SGD(net.parameters(), lr=0.5), next(net.parameters()).device
    for step in range(STEPS):
        tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(step), device="cpu").to(device)
        optimizer.zero_grad()
        loss_of(tokens.chunk(ranks)[rank]).backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]


def count_gathers(work):
    """Returns what work() returns, and how many gathers it called. CommDebugMode fails in PyTorch 2.11."""
    from torch.utils._python_dispatch import TorchDispatchMode
    found = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if dist.tensor.DTensor in types:
                return NotImplemented  # its operations come again, on the parts
            name = str(function)
            found.extend([name] if "c10d" in name and "gather" in name else [])
            return function(*args, **(kwargs or {}))
    with Counter():
        return work(), len(found)


def join(rank, ranks, port):
    """The device that this rank computes on, a GPU where each can have one, and the mesh of them all."""
    kind = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(kind)
    return kind, dist.init_device_mesh(kind, (ranks,))


def rank_main(rank, ranks, port, way):
    from torch.distributed.fsdp import fully_shard
    device, mesh = join(rank, ranks, port)
    torch.manual_seed(5)
    alone = (lce.patch_transformers(model_of("llama")) if way == "patched" else Net()).to(device)
    net = copy.deepcopy(alone)
    head = net.get_output_embeddings() if way == "patched" else net.head

    def loss_of(module):
        return (lambda tokens: module(tokens, labels=tokens).loss) if way == "patched" else module
    if way == "ddp":
        module = torch.nn.parallel.DistributedDataParallel(net)
    else:
        fully_shard(head, mesh=mesh, reshard_after_forward=False)
        module = fully_shard(net, mesh=mesh)
    got, gathers = count_gathers(lambda: trained(net, loss_of(module), rank, ranks))
    wanted = 0 if way == "ddp" else 2 * STEPS + len(got)  # the head and the rest once a step, then every full_tensor
    assert gathers == wanted, f"{gathers} gathers, not {wanted}"
    all_close(way, got, trained(alone, loss_of(alone), 0, 1), 1e-5)
    dist.destroy_process_group()


def split_rank_main(rank, ranks, port):
    """Each rank's tokens and rows of the head, against all tokens and the whole head."""
    _, mesh = join(rank, ranks, port)
    more = [min(3 // ranks + 1, max(0, 3 - i * (3 // ranks + 1))) for i in range(ranks)]  # the last ones may have none
    for sizes in [len(part) for part in torch.arange(101).tensor_split(ranks)], more:
        split_as_whole(rank, ranks, sizes)
    what_a_group_refuses(rank, ranks, mesh)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still drop the last call's tensors, and abort where the interpreter is ending


def split_as_whole(rank, ranks, sizes):
    n, h, v = 21, 16, sum(sizes)
    torch.manual_seed(7)
    x, weight, bias = torch.randn(ranks * n, h), torch.randn(v, h), torch.randn(v)
    target, upstream, tokens = torch.randint(v, (ranks * n,)), torch.randn(2, ranks * n), torch.rand(ranks * n)
    target[::6] = -100
    local, split = slice(rank * n, (rank + 1) * n), dict(group=dist.group.WORLD, vocab_size=v)
    terms = dict(label_smoothing=0.1, z_loss=0.01, temperature=0.7, class_weights=torch.rand(v), chunk=8)

    def gradients(leaves, whole):
        """Returns them as this rank has them, or those of all tokens and rows cut to this rank's."""
        for t, dimension in zip(leaves, ("tokens", "rows", "rows")):
            if t.grad is not None:
                gradient, t.grad = t.grad, None
                yield gradient if not whole else gradient[local] if dimension == "tokens" else gradient.split(sizes)[rank]

    def leaves(whole):
        own = (x, weight, bias) if whole else (x[local], weight.split(sizes)[rank], bias.split(sizes)[rank])
        return [t.clone().requires_grad_() for t in own]

    def losses(whole):
        mine, cut = (slice(None), local) if whole else (local, slice(None))
        x_, weight_, bias_ = leaves(whole)
        for more, reduction in itertools.product(({}, terms, dict(softcap=3.0, z_loss=0.01)), ("sum", "none", "mean")):
            loss, *more = lce.linear_cross_entropy(
                x_, weight_, target[mine], None if "softcap" in more else bias_, reduction=reduction,
                token_weights=tokens[mine], outputs=lce.functional.OUTPUTS, **more, **({} if whole else split))
            loss.backward(upstream[0, mine] if reduction == "none" else torch.tensor(0.3))
            loss = loss.detach().clone()
            yield from (output[cut] for output in more)
            if reduction == "sum" and not whole:
                dist.all_reduce(loss)
            yield loss[cut] if reduction == "none" else loss
            yield from gradients((x_, weight_, bias_), whole)

    def log_probs(whole):
        """The whole in float64, by PyTorch."""
        mine, cut = (slice(None), local) if whole else (local, slice(None))
        own = [t.detach().double().requires_grad_() if whole else t for t in leaves(whole)]
        for softcap, chunk, of_both, frozen in ((0.0, 8, (1, 0), None), (0.0, 99, (0, 1), None), (3.0, 8, (1, 1), None),
                                                (0.0, 8, (1, 1), 0), (3.0, 99, (0, 1), 1)):
            if whole:
                z = torch.nn.functional.linear(*own)
                p = torch.log_softmax((softcap * torch.tanh(z / softcap) if softcap else z) / 0.7, -1)
                counts = target >= 0
                pair = p.gather(-1, target.clamp(0)[:, None])[:, 0] * counts, -(p.exp() * p).sum(-1) * counts
            else:
                own = [t.requires_grad_(i != frozen) for i, t in enumerate(own)]
                pair = lce.linear_log_probs(own[0], own[1], target[mine], 0.7, bias=own[2], softcap=softcap, chunk=chunk, **split)
            sum((u[mine] * t).sum() for u, t, used in zip(upstream, pair, of_both) if used).backward()
            yield from (t[cut] for t in pair)
            if whole and frozen is not None:
                own[frozen].grad = None
            yield from gradients(own, whole)

    for results, most in (losses, 2e-5), (log_probs, 1e-4):
        pairs = ((got, want) for got, want in zip(results(False), results(True), strict=True) if want.numel())
        all_close(f"{results.__name__}, rank {rank} of {sizes}", *zip(*pairs), most)


def what_a_group_refuses(rank, ranks, mesh):
    n, h, v = 21, 16, 100
    x, weight, target = torch.randn(n, h), torch.randn(v, h), torch.randint(v, (n,))
    dist.broadcast(weight, 0)
    shard = dist.tensor.distribute_tensor(weight, mesh, [dist.tensor.Shard(0)])
    part, bias = weight.chunk(ranks)[rank], torch.randn(v)
    raises(TypeError, "weight is a DTensor", lambda: lce.linear_cross_entropy(x, shard, target))
    same = [lce.linear_cross_entropy(x, w, target, group=mesh.get_group(), vocab_size=v, reduction="sum")
            for w in (shard.to_local(), part)]
    assert torch.equal(*same)

    def sum_of_log_probs(x_):  # the entropy is not differentiated, which compiled code does not know
        return lce.linear_log_probs(x_, part, target, group=dist.group.WORLD, vocab_size=v)[0].sum()
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(sum_of_log_probs, backend="eager")
    close("compiled", *(torch.autograd.grad(f(leaf), leaf)[0] for f in (compiled, sum_of_log_probs)), 1e-6)
    alike = dict(x=x, weight=part, target=target, group=dist.group.WORLD, vocab_size=v, reduction="sum")
    rows, last, few = [len(t) for t in weight.chunk(ranks)], rank == ranks - 1, 0 if rank == ranks - 1 else n
    for kind, told, more in (
            (RuntimeError, "label smoothing under a softcap excludes", dict(softcap=3.0, label_smoothing=0.1)),
            (ValueError, "bias has the shape", dict(bias=bias)),
            (ValueError, f"have {[v] * ranks} rows of weight, which make no vocab_size of {[v] * ranks}", dict(weight=weight)),
            (ValueError, f"have {[*rows[:-1], rows[-1] - 1]} rows", dict(weight=part[last:])),
            (ValueError, "ranks without rows come last", dict(weight=weight[:0] if rank == 0 else weight, vocab_size=(ranks - 1) * v)),
            (ValueError, f"give {[n] * (ranks - 1) + [0]} tokens", dict(x=x[:few], target=target[:few]))):
        raises(kind, told, lambda: lce.linear_cross_entropy(**{**alike, **more}))
    if ranks == 3:  # of which the last has fewer rows
        raises(ValueError, "which make no vocab_size of [102, 102, 96]", lambda: lce.linear_cross_entropy(**{**alike, "vocab_size": None}))


def on_ranks(main, ranks, *more):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(main, (ranks, port, *more), nprocs=ranks)


def a_head_split_over_ranks():
    for ranks in (2, 3, 4):
        on_ranks(split_rank_main, ranks)


def examples_of_the_readme():
    examples, names = readme_examples(), {}
    assert len(examples) == 5
    for example in examples:
        if transformers or "transformers" not in example:
            exec(example, names)
    assert names["x"].grad.norm() > 0 and names["weight"].grad.norm() > 0


if __name__ == "__main__":
    run(dict(llama=lambda: curves_are_equal("llama"), qwen=lambda: curves_are_equal("qwen2", tie_word_embeddings=True),
             all_models=all_models, evaluation=evaluation, smoothing_under_a_softcap=smoothing_under_a_softcap,
             training_without_labels=training_without_labels, copies=copies, models_that_are_refused=models_that_are_refused,
             forwards_that_change_what_they_hand_on=forwards_that_change_what_they_hand_on, after_the_patch=after_the_patch,
             logits_that_change_after_the_patch=logits_that_change_after_the_patch, threads=threads,
             peft_models=peft_models, trainers=trainers, compiled_model=compiled_model,
             ddp=lambda: on_ranks(rank_main, 2, "ddp"), fsdp2=lambda: on_ranks(rank_main, 2, "fsdp2"),
             fsdp2_of_a_patched_model=lambda: model_of("llama") and on_ranks(rank_main, 2, "patched"),
             a_head_split_over_ranks=a_head_split_over_ranks, examples_of_the_readme=examples_of_the_readme))
