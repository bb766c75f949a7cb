"""Words that people write in rule files from habit, and the form that means the same here."""

from collections.abc import Container

_FORMS = {
    "clip-norm": "action: clip-norm, per: rule, max_norm: 1.0",
    "clip-each": "action: clip-norm, per: parameter, max_norm: 1.0",
    "clamp": "action: clamp, at: step, min: -1.0, max: 1.0",
    "spikes": "action: spike-trap, above: {sigmas: 2.5}",
    "autoclip": "action: spike-trap, above: {percentile: 99, window: 1000}",
    "sanitize": "action: sanitize",
    "nan-trap": "action: nan-trap",
    "skip": "action: nan-trap, then: skip-step",
    "reversal": "action: scale, factor: -1.0",
    "scale": "action: scale, factor: 0.1",
    "zero": "action: zero",
    "freeze": "action: freeze",
    "mask": 'action: mask, rows: "32000:"',
    "norm-log": "action: norm-log",
    "histogram": "action: norm-log, stats: [histogram]",
    "noise": "action: noise, std: 0.01",
    "centralize": "action: centralize",
    "combine": "action: combine, method: pcgrad, losses: [a, b]",
    "capture": "action: capture",
}
# The words for each form, in lower case and with `-` between them.
_WORDS = {
    "clip-norm": "clip clip-grad clip-grads clip-gradient clip-gradients clip-grad-norm clip-global-norm global-norm grad-clip "
    "gradient-clip gradient-clipping grad-clipping clip-by-global-norm max-grad-norm norm-clip",
    "clip-each": "clip-by-norm clip-per-tensor clip-per-parameter",
    "clamp": "clip-value clip-grad-value clip-by-value clip-element clamp-value clamp-grad value-clip",
    "spikes": "zclip adagc adaptive-clip adaptive-clipping clip-spike clip-spikes",
    "autoclip": "autoclip auto-clip percentile-clip clip-percentile",
    "sanitize": "nan-to-num nan2num replace-nan fill-nan remove-nan nan-to-zero nan-replace",
    "nan-trap": "detect-anomaly detect-nan anomaly anomaly-detection check-nan nan-check nan-guard nan-detector isnan "
    "assert-finite check-finite terminate-on-nan",
    "skip": "skip skip-nan skip-step skip-nonfinite",
    "reversal": "gradient-reversal grad-reversal reverse-gradient reverse-grad reverse reversal grl negate invert",
    "scale": "multiply mul times scale-grad scale-gradient grad-scale gradient-multiplier multiplier lr-scale lr-mult "
    "lr-multiplier layerwise-lr",
    "zero": "detach stop-gradient stop-grad no-grad block zero-grad drop",
    "freeze": "unfreeze requires-grad lock fix",
    "mask": "lottery-mask mask-rows row-mask rows mask-grad gradient-mask prune pruning-mask freeze-rows freeze-embedding",
    "norm-log": "watch log monitor norm grad-norm grad-norms gradient-norm log-norm log-norms log-grad log-gradients total-norm "
    "track-grad-norm plot-grad-flow record track stats",
    "histogram": "hist histogram histograms log-histogram",
    "noise": "add-noise gradient-noise grad-noise gaussian-noise annealed-noise langevin",
    "centralize": "gc center centre gradient-centralization grad-centralization",
    "combine": "pcgrad cagrad mgda imtl-g a-gem gradient-surgery multi-task",
    "capture": "save store keep cache dump save-grad retain-grad hook",
}
_KEYS = {
    "name": "id: my-rule",
    "every": "steps: {every: 10}",
    "interval": "steps: {every: 10}",
    "freq": "steps: {every: 10}",
    "frequency": "steps: {every: 10}",
    "log_every": "steps: {every: 10}",
    "until": "steps: {to: 1000}",
    "before": "steps: {to: 1000}",
    "to": "steps: {to: 1000}",
    "after": "steps: {from: 1000}",
    "from": "steps: {from: 1000}",
    "start": "steps: {from: 1000}",
    "warmup_steps": "steps: {from: 1000}",
    "module_type": "where: {module_type: Linear}",
    "type": "where: {module_type: Linear}",
    "ndim": "where: {ndim: 2}",
    "dtype": "where: {dtype: bfloat16}",
    "requires_grad": "where: {requires_grad: true}",
    "layer": 'modules: ["encoder.*"]',
    "layers": 'modules: ["encoder.*"]',
    "weights": 'params: "*.weight"',
    "pattern": 'params: "*.weight"',
    "match": 'params: "*.weight"',
    "ignore": 'exclude: "*.bias"',
    "skip": 'exclude: "*.bias"',
    "max_grad_norm": "max_norm: 1.0",
    "clip_value": "min: -1.0, max: 1.0",
    "percentile": "above: {percentile: 99, window: 1000}",
    "window": "above: {percentile: 99, window: 1000}",
    "threshold": "above: {norm: 10}",
    "norm": "above: {norm: 10}",
    "sigmas": "above: {sigmas: 2.5}",
    "times": "above: {times: 1.05}",
    "statistics": "stats: [l2]",
    "metrics": "stats: [l2]",
    "point": "at: step",
    "moment": "at: step",
    "mode": 'no key of a rule, but `apply(..., mode="observe")` or `gradsurgeon run --mode observe`',
}
_MOMENTS = {
    "after-backward": "at: accumulated, or at: step for a rule that edits",
    "post-backward": "at: accumulated, or at: step for a rule that edits",
    "pre-step": "at: step",
    "before-step": "at: step",
    "optimizer-step": "at: step",
    "post-accumulate": "at: accumulated",
    "hook": "at: backward",
}


def _normalized(word: str) -> str:
    return word.casefold().strip("_").replace("_", "-").replace(" ", "-")


_ACTIONS = {word: _FORMS[form] for form, words in _WORDS.items() for word in words.split()}


def _meant(form: str | None) -> str:
    if form is None:
        return ""
    if form.startswith("no key"):
        return f"it is {form}"
    return f"did you mean `{form}`?"


def action_meant(word: str) -> str:
    """Return a hint with the whole form that a word stands for as an action; empty if it is unknown."""
    return _meant(_ACTIONS.get(_normalized(word)))


def key_meant(word: str, given: Container[str]) -> str:
    """Return a hint with the form that a word stands for as a key of a rule with other keys; empty if it is unknown."""
    form = _KEYS.get(word.casefold().replace("-", "_"))
    if form is not None and form.partition(":")[0] in given:
        return ""
    return _meant(form)


def value_meant(key: str, value: object) -> str:
    """Return a hint with the form that a wrong value of a key stands for; empty if it is unknown."""
    if key == "steps" and isinstance(value, int) and value > 0:
        return _meant(f"steps: {{to: {value}}}")
    if key == "above" and isinstance(value, int | float):
        return _meant(f"above: {{norm: {value}}}")
    if key == "at" and isinstance(value, str):
        return _meant(_MOMENTS.get(_normalized(value)))
    if key == "action" and isinstance(value, str):
        return action_meant(value)
    return ""
