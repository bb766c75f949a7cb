"""The part of the reference on output for programs. `test_cli_report_formats` holds its keys against a real report."""

TEXT = """\
## The report as JSON

`gradsurgeon report RUN --format json` prints one object. NaN and infinity are the texts `"NaN"`, `"Infinity"` and `"-Infinity"`.

| key | value |
|---|---|
| `version` | 1 |
| `title` | text |
| `ended` | `state` (`running`, `ended`, `stopped` or `unknown`), `words`, and the words of each of `ranks` |
| `steps` | first and last |
| `notes` | sentences |
| `remarks` | what stands out, each a sentence |
| `params` | names of parameters |
| `rules` | objects with `id`, `action`, `role` and `status`, which is `null` before the first step |
| `events` | the events, with `kind`, `rank` and `message` |
| `norms` | an object per tensor, below |
| `losses` | an object per curve of losses, below |
| `rates` | the learning rate of each group of parameters, below |
| `median_of_one_step_in` | n: in a long run n successive steps count as one, by their largest norm, and steps are exact to n |
| `inside` | the runs inside the directory |

**`norms`**: `name`; `kind` (`gradient`, `output`, `output gradient`, ...); the `rule` and `point` that measured it; the `first`, `median`, `largest`
and `last` norm; `spike` (`step`, `value`, and how many `times` the median before it, or `null`); `nonfinite` (how many norms);
`nonfinite_step` (the first one, or `null`); `zero_since` (the step from which on it is 0, or `null`).

**`losses`**: `rule`; `stat` (`loss` of an update, `cosine` and `ratio` of a pair, `weight` and `distance` of a combination, or the statistic of a
tagged loss); `name`; `steps` and `values`, at most 2,000 points, each the worst of a few steps in a longer run; `calls`, and how many of them are `nonfinite` (of a pair, a loss gave no finite gradient); the `first` and `last` value; the
`least`, `median`, `mean` and `largest` finite one; `negative` (the share below 0).

**`rates`**: `optimizer` (its class, after its module if each optimizer has one of its own); `group` (its number, from 0); `steps` and `values`, at most 2,000
points, where the learning rate begins to change or stops to.

## A comparison as JSON

`gradsurgeon compare ... --format json` prints `version` (1), `alike`, `verdict` (the first line of the text), and the attributes of a
[`Comparison`](python-api.md#comparison) by their names. `first`, `last` and `largest` are tensors: objects with their name, `distance` and `tolerance`. An infinite distance is `null`.
"""
