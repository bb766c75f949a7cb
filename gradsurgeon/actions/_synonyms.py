"""Words that people write in rule files from habit, and the form that means the same here."""

from collections.abc import Mapping


def _by_word(words_of: Mapping[str, str]) -> dict[str, str]:
    form_of: dict[str, str] = {}
    for form, words in words_of.items():
        form_of |= dict.fromkeys(words.split(), form)
    return form_of


_OWN = "no action of gradsurgeon, but one of your own with ten lines: the guide has it on the page of own actions"
# The words for each form, in lower case and with `-` between them.
_ACTIONS = _by_word(
    {
        "action: clip-norm, per: rule, max_norm: 1.0": "clip clip-grad clip-grads clip-gradient clip-gradients clip-grad-norm "
        "clip-global-norm global-norm grad-clip gradient-clip gradient-clip-val gradient-clipping grad-clipping clip-by-global-norm max-grad-norm "
        "norm-clip gclip",
        "action: clip-norm, per: parameter, max_norm: 1.0": "clip-by-norm clip-per-tensor clip-per-parameter",
        "action: clip-norm, per: unit, relative_to: weight, max_norm: 0.01": "agc adaptive-gradient-clipping unitwise-clip",
        "action: clip-norm, tensor: value, per: unit, max_norm: 3.0": "max-norm maxnorm max-norm-constraint clip-weight-norm",
        "action: clamp, at: step, min: -1.0, max: 1.0": "clip-value clip-grad-value clip-by-value clip-element clamp-value "
        "clamp-grad value-clip",
        "action: clamp, tensor: value, min: -0.01, max: 0.01": "weight-clip weight-clipping clip-weight clip-weights "
        "weight-clamp clamp-weight clamp-weights",
        "action: spike-trap, above: {sigmas: 2.5}": "zclip adaptive-clip adaptive-clipping clip-spike clip-spikes spike "
        "spikes",
        "action: spike-trap, per: parameter, above: {times: 1.05}": "adagc",
        "action: spike-trap, above: {percentile: 99, window: 1000}": "autoclip auto-clip percentile-clip clip-percentile",
        "action: spike-trap, above: {norm: 10}, then: skip-step": "skip-spike skip-spikes skip-large skip-large-updates",
        "action: spike-trap, tensors: loss, tensor: value, above: {sigmas: 6}, then: skip-step": "loss-spike loss-spikes "
        "skip-loss-spike loss-trap loss-guard clip-loss bad-batch skip-batch skip-bad-batch skip-bad-batches",
        "action: spike-trap, tensor: update, above: {sigmas: 6}": "clip-update clip-updates update-clip update-spike",
        "action: sanitize": "nan-to-num nan2num replace-nan fill-nan remove-nan nan-to-zero nan-replace filter-nan",
        "action: nan-trap": "detect-anomaly detect-nan anomaly anomaly-detection check-nan nan-check nan-guard nan-detector isnan nan "
        "assert-finite check-finite terminate-on-nan",
        "action: nan-trap, then: skip-step": "skip skip-nan skip-on-nan skip-step skip-nonfinite",
        'action: scale, modules: "head", tensor: input.grad, factor: -1.0': "gradient-reversal grad-reversal reverse-gradient reverse-grad reverse reversal grl negate "
        "invert",
        "action: scale, factor: 0.1": "multiply mul times scale-grad scale-gradient grad-scale gradient-multiplier multiplier "
        "rescale",
        "action: scale, tensor: update, factor: 0.1": "lr lr-scale lr-mult lr-multiplier layerwise-lr layer-decay llrd "
        "discriminative-lr",
        "action: zero": "detach stop-gradient stop-grad no-grad block zero-grad drop ablate ablation",
        "action: freeze": "unfreeze requires-grad lock fix freeze-layer freeze-layers",
        'action: mask, rows: "32000:"': "mask-rows row-mask rows freeze-rows freeze-embedding",
        "action: mask, file: masks.safetensors": "lottery lottery-mask lottery-ticket mask-file apply-mask weight-mask mask-weights mask-grad mask-gradient gradient-mask "
        "gradient-masking prune pruning pruning-mask element-mask sparsify",
        "action: norm-log": "watch wandb.watch log monitor norm grad-norm grad-norms gradient-norm log-norm log-norms log-grad log-gradients "
        "track-grad-norm plot-grad-flow record track stats print trace log-loss loss-log track-loss",
        "action: norm-log, tensor: state.exp_avg": "log-state state-log log-optimizer optimizer-state adam-state moments "
        "log-moments exp-avg momentum log-momentum momentum-norm",
        "action: norm-log, per: rule": "total-norm total-grad-norm log-total-norm",
        "action: norm-log, stats: [histogram]": "hist histogram histograms log-histogram",
        "action: norm-log, stats: [linf]": "absmax abs-max amax",
        "action: norm-log, tensor: update, stats: [ratio]": "update-ratio log-update log-updates",
        "action: noise, std: 0.01": "add-noise gradient-noise grad-noise gaussian-noise annealed-noise langevin noise-injection",
        "action: centralize": "gc center centre gradient-centralization grad-centralization",
        "action: combine, method: pcgrad, losses: [a, b]": "pcgrad surgery gradient-surgery multi-task",
        "action: combine, method: cagrad, c: 0.4, losses: [a, b]": "cagrad",
        "action: combine, method: mgda, losses: [a, b]": "mgda",
        "action: combine, method: imtl-g, losses: [a, b]": "imtl-g imtl",
        "action: combine, method: dualproj, memory: [b], losses: [a, b]": "a-gem agem",
        "action: conflict, losses: [a, b]": "cosine cosine-sim cosine-similarity gradient-conflict gradient-cosine",
        "action: capture": "save store keep cache dump save-grad retain-grad hook features activations saliency grad-cam",
        _OWN: "top-k topk sign sign-sgd signsgd ewc gpm project quantize 8-bit dropout normalize normalise",
    }
)
# A word after `/` is meant inside this mapping, or in rules of this action.
_KEYS = _by_word(
    {
        "id: my-rule": "name title label",
        "steps: {every: 10}": "every interval freq frequency log_every log_freq every_n every_n_steps steps/freq steps/step",
        "steps: {to: 1000}": "until before to end end_step to_step steps/until steps/end steps/stop",
        "steps: {from: 1000}": "after from start start_step from_step warmup warmup_steps steps/start steps/after steps/begin",
        "where: {module_type: Linear}": "module_type type layer_type",
        "where: {ndim: 2}": "ndim",
        "where: {dtype: bfloat16}": "dtype",
        "where: {requires_grad: true}": "requires_grad",
        'modules: ["encoder.*"]': "layer layers",
        'params: "*.weight"': "weights pattern match target targets regex only names",
        'exclude: "*.bias"': "ignore skip except exclude_params",
        "max_norm: 1.0": "max_grad_norm clip-norm/norm clip-norm/max clip-norm/threshold clip-norm/clip clip-norm/value "
        "clip-norm/bound clip-norm/limit",
        "min: -1.0, max: 1.0": "clip_value clamp/value clamp/bound clamp/limit clamp/low clamp/high clamp/lower clamp/upper",
        "factor: 0.1": "scale/by scale/multiplier scale/scale scale/alpha scale/lr scale/value scale/weight",
        "std: 0.01": "noise/sigma noise/stddev noise/scale noise/eta",
        "decay: 0.55": "noise/gamma",
        'rows: "32000:"': "mask/row mask/index mask/indices mask/idx mask/slice",
        "file: masks.safetensors": "mask/mask mask/masks mask/path",
        "above: {percentile: 99, window: 1000}": "percentile window quantile above/quantile",
        "above: {norm: 10}": "threshold norm above/threshold above/value above/max_norm",
        "above: {sigmas: 2.5}": "sigmas zscore z_thresh above/std above/zscore above/z_thresh",
        "above: {times: 1.05}": "times above/ratio above/factor",
        "tensors: loss, tensor: value": "spike-trap/loss spike-trap/losses spike-trap/metric spike-trap/monitor",
        "stats: [l2]": "statistics metrics",
        "at: step": "point moment",
        "then: skip-step": "on_nan on_trip skip_step",
        "give_up_after: 10": "patience max_skips max_trips",
        'no key of a rule, but `apply(..., mode="observe")` or `gradsurgeon run --observe`': "mode",
        "no key of a rule, but a comment: `# why`": "description comment reason doc",
    }
)
# The value after its key.
_VALUES = _by_word(
    {
        "at: accumulated, or at: step for a rule that edits": "at/after-backward at/post-backward",
        "at: step": "at/pre-step at/before-step at/optimizer-step at/optimizer",
        "at: accumulated": "at/post-accumulate",
        "at: backward": "at/hook",
        "tensor: update": "at/update at/after-step at/post-step tensor/delta tensor/updates tensor/change",
        "tensor: value": "tensor/weight tensor/weights tensor/data tensor/parameter",
        "tensor: output.grad": "tensor/grad-output tensor/output-grad tensor/grad-out tensor/grad",
        "tensor: input.grad": "tensor/grad-input tensor/input-grad",
        "tensor: output": "tensor/activation tensor/activations tensor/out tensor/outputs tensor/features",
        "tensor: input": "tensor/inputs",
        "per: rule": "per/global per/all per/model per/total",
        "per: parameter": "per/tensor per/param per/each",
        "per: module": "per/layer per/block",
        "per: unit": "per/row per/channel per/neuron per/filter",
        "then: skip-step": "then/skip then/zero then/ignore",
        "then: raise": "then/stop then/error then/abort then/exit then/fail",
        "then: warn": "then/log then/print then/warning",
        "norm_type: 2": "norm_type/l2 norm_type/2 norm_type/euclidean",
        "norm_type: inf": "norm_type/linf norm_type/max norm_type/infinity",
        "stats: [linf]": "stats/absmax stats/abs-max stats/max-abs stats/amax stats/inf stats/inf-norm",
        "stats: [l2]": "stats/norm stats/l2-norm stats/grad-norm",
        "stats: [std]": "stats/var stats/variance",
        "stats: [nonfinite]": "stats/nan stats/nans stats/isnan",
        "stats: [zeros]": "stats/sparsity stats/nonzero stats/dead",
        "stats: [l1, numel]": "stats/abs-mean stats/mean-abs",
        "stats: [l2, numel]": "stats/rms",
        "stats: [histogram]": "stats/hist",
        "tensor: update, stats: [ratio]": "stats/update-ratio",
    }
)


def _normalized(word: object) -> str:
    return str(word).casefold().strip("_").replace("_", "-").replace(" ", "-")


def _meant(form: str | None) -> str:
    if not form:
        return ""
    if form.startswith("no "):
        return f"it is {form}"
    return f"did you mean `{form}`?"


def action_meant(word: str) -> str:
    """Return a hint with the whole form that a word stands for as an action; empty if it is unknown."""
    return _meant(_ACTIONS.get(_normalized(word)))


def key_meant(path: str, given: Mapping[str, object]) -> str:
    """Return a hint with the form that an unknown key of a rule stands for; ``path`` has `/` before a key in a mapping."""
    word = path.casefold().replace("-", "_")
    form = _KEYS.get(f"{given.get('action')}/{word}")
    # A ramp has keys of its own.
    if form is None and "action" in given:
        form = _KEYS.get(word, "")
        if "/" not in word and form.partition(":")[0] in given:
            return ""
    return _meant(form)


def value_meant(key: str, value: object) -> str:
    """Return a hint with the form that a wrong value of a key stands for; empty if it is unknown."""
    if key == "steps" and isinstance(value, int) and value > 0:
        return _meant(f"steps: {{to: {value}}}")
    if key == "steps" and isinstance(value, list):
        first, last = [*value, 0, 1000][:2]
        return _meant(f"steps: {{from: {first}, to: {last}}}")
    if key == "above" and isinstance(value, int | float):
        return _meant(f"above: {{norm: {value}}}")
    if key == "action":
        return action_meant(str(value))
    return _meant(_VALUES.get(f"{key}/{_normalized(value)}"))
