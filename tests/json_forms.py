"""The part of the reference on output for programs. `test_cli_report_formats` holds its keys against a real report."""

TEXT = """\
## The report as JSON

`gradsurgeon report RUN --format json` prints one object. NaN and infinity are the texts `"NaN"`, `"Infinity"` and `"-Infinity"`.

| key | value |
|---|---|
| `version` | 1 |
| `title` | text |
| `band` | `state` (`fine`, `look` or `broken`) and a `sentence` |
| `ended` | `state` (`running`, `ended`, `stopped` or `unknown`), `words`, and the words of each of `ranks` |
| `ranks` | of a run directory how far each rank came: `rank`; `step`, the last with a record, or `null`; `written`, when it last wrote, in seconds since 1970; `behind`, how many steps of the rank that is furthest |
| `steps` | first and last |
| `notes` | sentences |
| `remarks` | what stands out, each a sentence |
| `params` | names of parameters |
| `rules` | objects with `id`, `action`, `role` and `status`, which is `null` before the first step |
| `events` | the events, with `kind`, `rule`, `step`, `rank`, `name` and `message`; `diagnosis`, below, or `null`; `sample_ids`, those of the step, at most 256; and `told_at`, the step before which the host heard of a decision of the device, or `null` |
| `norms` | an object per tensor, below |
| `losses` | an object per curve of losses, below |
| `rates` | the learning rate of each group of parameters, below |
| `median_of_one_step_in` | n: in a long run n successive steps count as one, by their largest norm, and steps are exact to n |
| `inside` | the runs inside the directory |

**`norms`**: `name`; `kind` (`gradient`, `output`, `output gradient`, ...); the `rule` and `point` that measured it; the `first`, `median`, `largest`
and `last` norm; `spike` (`step`, `value`, and how many `times` the median before it, or `null`); `nonfinite` (how many norms);
`nonfinite_step` (the first one, or `null`); `zero_since` (the step from which on it is 0, or `null`).

**`losses`**: `rule`; `stat` (`loss` of an update, `cosine` and `ratio` of a pair, `weight` and `distance` of a combination, or the statistic of a
tagged loss); `name`; `steps` and `values`, at most 2,000 points, each the worst of a few steps in a longer run (of `cosine` the least, else the largest); `calls`, and how many of them are `nonfinite` (of a pair, a loss gave no finite gradient); the `first` and `last` value; the
`least`, `median`, `mean` and `largest` finite one; `negative` (the share below 0).

**`rates`**: `optimizer` (its class, after its module if each optimizer has one of its own); `group` (its number, from 0); `steps` and `values`, at most 2,000
points, evenly over the steps.

## A plan as JSON

`gradsurgeon plan ... --format json` prints one object.

| key | value |
|---|---|
| `version` | 1 |
| `model` | `params` and `elements`, how many there are |
| `rules` | objects with `id`, `action`, `tensor`, `point`, `hook`, the names `params` and `modules`, `elements`, `warnings`, `losses` and `method` of a rule on losses, and `on` with `--on RUN` |
| `chains` | by tensor the ids of its rules, in order of effect |
| `warnings` | sentences |

**`on`**: what the rule would have done in the `run`: `steps`, the updates that have the needed records; `acts`, those in which it would have changed a tensor or
tripped; `share`, `acts` over `steps`; `largest`, where it would have acted most, or `null`: `name`, `step` and `factor` (norm over bound, at least 1, `null` without a bound, or if it is infinite).
If the records do not tell, `told` is `false`, `missing` says why, and the numbers are `null`. With `--thresholds` also `thresholds`, objects with the `group` of tensors, its
`steps`, and its `thresholds`: `quantile`, `value`, and the updates `acts` in which a rule with this bound would have acted.

## A difference as JSON

`gradsurgeon diff ... --format json` prints one object.

| key | value |
|---|---|
| `version` | 1 |
| `added`, `removed` | objects with `id`, `action`, `target`, the names `params` and `modules`, `elements`, and `on` |
| `changed` | objects with `id`, `action`, `target`, `fields` (`name`, `before`, `after`), `effect`, `params_before`, `params_after`, `elements_before`, `elements_after`, and `on` |
| `order` | pairs of rules that act in another order: `first` and `second` now, on how many `tensors`, and `on`: for `first` and `second` each as for a changed rule, or `null` |
| `params`, `tensors` | tensors under other rules: `name`, and the ids `before` and `after`; a renamed rule has its new id in both |
| `lost_protection` | parameters that a rule edited, trapped or froze, and no rule does now |
| `lost_trap` | further parameters for which no trap stops or skips a step now |
| `less_often_trapped` | traps that look in fewer steps: `rule`, and the `params` for which no other trap looks in the others |
| `covered` | how many parameters have rules, `before` and `after` |
| `model` | `params` and `elements`, how many there are |
| `warnings` | why training newly ends before its first step: `kind`, `rule` and `detail` |
| `in_effect` | whether the effect differs |

**`effect`**: `kind` (`looser`, `tighter`, `schedule`, `renamed`, `order` or `other`), `field` (the option), `factor` (new over old; `null` if there is none), and `text`.

**`on`**, with `--on RUN`: `before` and `after`, each as in a plan, or `null` on a side that lacks the rule.

## The diagnosis as JSON

The key `diagnosis` of an event in `report --format json` and `export --format jsonl`, and of `step.json` in a bundle, is an object. In Python
`Diagnosis.to_json()` returns it. Indices count from 0.

| key | value |
|---|---|
| `certainty` | `reproduced`, `partial` or `not reproduced`: then no operation is blamed |
| `reasons` | why it is not more certain, sentences |
| `headline` | where the number became non-finite, a sentence |
| `what` | `NaN`, `Inf` or `-Inf` |
| `where` | `forward` or `backward`; or the kind of tensor that was non-finite before: `weight`, `buffer`, `input`, `loss input`, `output gradient`, `literal`, `unknown`; or empty |
| `op` | the operation in PyTorch's dispatcher, such as `aten._softmax`; empty if none is blamed |
| `module` | name of the module, `.` for the root; empty outside of the model |
| `direction` | `forward` or `backward`, empty without an operation |
| `name` | the weight, buffer or input that was non-finite before |
| `file`, `line`, `code` | the innermost line outside of PyTorch, and its text; empty and `null` if it is not known |
| `cause` | `overflow`, `underflow`, `mathematics`, `bad input`, `kernel`, `transient` or `unknown`; empty if no operation is blamed |
| `evidence` | what repeating the operation has shown, sentences |
| `remedy` | what to try, a sentence |
| `tried` | objects, one for each remedy under which the step was run again: `remedy`; `outputs_finite`, `gradients_finite`; `loss`. Each is `null` where the replay cannot know it |
| `rows` | an object, below, or `null` |
| `inputs`, `outputs` | tensors: `name` (of an input: in the operation's schema), `shape` (-1 for a ragged dimension), `dtype`, `low` and `high` of the finite elements or `null`, `numel`, and how many are `nan`, `inf` (`minus_inf` included) and `minus_inf`, in which `rows` |
| `history` | the largest magnitudes in the outputs of the last operations before, oldest first: pairs of a name and a number |
| `before` | learning rates and losses up to the step, a sentence |
| `rank` | the rank that found it |
| `bundle` | path of the bundle, empty without one and in `step.json` |

**`rows`**: the non-finite `rows` of the blamed tensor, and the `size` of its first dimension; of a matrix also the `columns`, if they are few. `null` if all rows, or
more than 100, are non-finite. If another replay, with another row of the input, has shown from where they come: `input_rows`. `ids`: the numbers of these samples that the
script tagged `sample_ids`.

## A comparison as JSON

`gradsurgeon compare ... --format json` prints `version` (1), `alike`, `verdict` (the first line of the text), and the attributes of a
[`Comparison`](python-api.md#comparison) by their names. `first`, `last` and `largest` are tensors: objects with their name, `distance` and `tolerance`. An infinite distance is `null`.
"""
