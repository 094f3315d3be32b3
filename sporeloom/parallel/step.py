# SPDX-License-Identifier: Apache-2.0
"""One training step as a graph: loss, gradients, clipping by their global norm, update."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from sporeloom.models.cells import COUNT_KINDS, CountingCell

square_sum = ops.MultitypeFuncGraph("square_sum")
_scale = ops.MultitypeFuncGraph("scale")
_add, _assign_sub, _larger = ops.Add(), ops.AssignSub(), ops.Maximum()
_clear, _keep = ops.MultitypeFuncGraph("clear"), ops.MultitypeFuncGraph("keep")
_place, _balance = ops.MultitypeFuncGraph("place"), ops.MultitypeFuncGraph("balance")
_largest = ops.MultitypeFuncGraph("largest")


@square_sum.register("Float", "Tensor")
def _square_sum_of(share, x):
    return ops.ReduceSum()(ops.square(ops.cast(x, mstype.float32))) * share


@_scale.register("Tensor", "Tensor")
def _scale_by(factor, x):
    return x * ops.cast(factor, x.dtype)


@_clear.register("Tensor", "Tensor")
def _clear_after(accumulated, gradient):
    accumulated = ops.depend(accumulated, gradient)
    return _assign_sub(accumulated, accumulated)  # zeros would be folded into a constant as large as the gradient


@_keep.register("Tensor", "Tensor")
def _keep_unless(overflow, gradient):
    return ops.masked_fill(gradient, overflow, ops.cast(0.0, gradient.dtype))  # times 0 would keep NaN


@_clear.register("Tensor", "Tensor", "Tensor")
def _clear_overflown(overflow, accumulated, gradient):
    accumulated = ops.depend(accumulated, gradient)
    accumulated = ops.depend(accumulated, ops.assign(accumulated, _keep_unless(overflow, accumulated)))
    return _assign_sub(accumulated, accumulated)


@_place.register("Tensor", "Float", "Tensor")
def _place_of(places, share, counted):
    return ops.ReduceSum()(places * ops.expand_dims(counted * share, 1), 0)  # (n, all) * (n, 1) -> (all,)


@_largest.register("Tensor", "Tensor", "Tensor")
def _largest_of(threshold, heads, logits):
    """Largest logit of an attention's heads, number of its head, and how many heads exceed the threshold: (3,)"""
    largest = ops.ReduceMax(True)(logits, 0)
    head = ops.ReduceMax(True)(heads * ops.cast(ops.equal(logits, largest), mstype.float32), 0)
    return ops.Concat(0)((largest, head, ops.ReduceSum(True)(ops.cast(logits > threshold, mstype.float32), 0)))


@_balance.register("Float", "Tensor", "Tensor")
def _balance_by(rate, bias, counted):
    load = counted[: bias.shape[0]]
    return ops.assign_add(bias, rate * ops.sign(ops.ReduceMean(True)(load) - load))


class TrainStep(nn.Cell):
    """Batch -> (loss, norm of its gradients), with one update by `optimizer`, a Cell called with the gradients.
    For a network with counters (see `sporeloom.nn.counter`) also their values for the global batch, one after
    the other; `count_lengths` gives the number of values of each.

    Without `max_grad_norm` the norm is measured and nothing clipped. In a pipeline only the last stage knows the loss;
    the others return 0.

    Args:
        report: what `parallelize` said of the network: how many ranks hold each gradient decides its share of the norm.
        rank: of this process.
        all_reduce: adds a number up over all ranks; None on one device.
        scale: of loss and gradients; 1 / microbatches makes a mean of what a pipeline adds up.
        accumulate: parts of the batch whose gradients are added up one after another, without a pipeline.
        qk_clip: called with the largest logits of each attention, counted in the step, and what the optimizer returned; it
            scales weights. None: only the logits are counted, where they are.
        averages: called with what the update returned; moving averages of the weights.
        loss_scale: let gradients be computed of the loss times `loss_scale`, a parameter that the caller sets before a step.
            Where one is not finite no rank updates anything, and the norm is not finite either.
    """

    def __init__(
        self,
        network,
        optimizer,
        report,
        rank,
        all_reduce=None,
        max_grad_norm=None,
        scale=1.0,
        accumulate=1,
        loss_scale=False,
        qk_clip=None,
        averages=None,
    ):
        super().__init__(auto_prefix=False)
        self.network = network.set_grad()
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.scales_loss = loss_scale
        if loss_scale:
            self.loss_scale = Parameter(Tensor(1.0, mstype.float32), name="optimizer_loss_scale", requires_grad=False)
            self.is_finite, self.invert = ops.IsFinite(), ops.LogicalNot()
        self.qk_clip, self.averages = qk_clip, averages
        self.grad = ops.GradOperation(get_by_list=True, sens_param=loss_scale)
        self.report = report
        self.attach_counters(rank)
        self.shares = report.norm_shares([weight.name for weight in self.weights], rank)
        self.all_reduce = all_reduce
        self.scale = scale
        self.clip = max_grad_norm is not None
        self.max_norm = Tensor(max_grad_norm or 0.0, mstype.float32)
        self.map = ops.HyperMap()
        self.sqrt, self.add_n, self.maximum = ops.Sqrt(), ops.AddN(), ops.Maximum()
        mesh = report.compiled_mesh
        on_one_device = mesh.size == 1
        self.num_parts = accumulate if on_one_device and not report.is_spmd else 1
        self.accumulate, self.takes_gradients = accumulate, False
        # The last stage returns the loss; where another one has it, it is broadcast.
        self.tells_loss = not report.is_spmd and report.stage_of_loss != mesh.pp - 1
        self.of_stage = 1.0 / mesh.stage_size
        self.buffered = mesh.pp > 1 or (accumulate > 1 and not on_one_device)
        if self.buffered:  # MindSpore's parallel passes add microbatches up in these, found by their name
            self.accumulated = self.trained.clone(prefix="accu_grads", init="zeros")
        self.reads_sums = self.buffered and not report.optimizer_parallel

    def attach_counters(self, rank):
        """Enable the counters of a network: each counts a part of the global batch, on the ranks of its stage."""
        counting = [(path, c) for path, c in self.network.cells_and_names() if isinstance(c, CountingCell)]
        objectives = [entry for entry in counting if entry[1].metrics is not None]
        counting = objectives[:1] or counting  # the outermost; layers have no losses of their own then
        counting.sort(key=lambda entry: COUNT_KINDS.index(entry[1].kind))
        counters = [cell.attach_counter(f"counter.{i}") for i, (_, cell) in enumerate(counting)]
        mesh = self.report.compiled_mesh
        layers = [layer for stage in self.report.layers_of_stages for layer in stage]
        mine = self.report.layers_of_stages[mesh.coordinate(rank, "pp")] if mesh.pp > 1 else []
        is_last = mesh.coordinate(rank, "pp") == self.report.stage_of_loss
        held = [
            any(f"{layer}." in path for layer in mine) if any(f"{layer}." in path for layer in layers) else is_last
            for path, _ in counting
        ]
        self.num_weights, self.trained = len(self.weights), ParameterTuple([*self.weights, *counters])
        self.counts = bool(counting)
        self.less, self.to_float = ops.Less(), ops.Cast()
        self.num_summed = self.num_weights + sum(cell.kind != "max_logits" for _, cell in counting)
        num_heads = [counter.shape[0] for counter in counters[self.num_summed - self.num_weights :]]
        self.counts_logits = bool(num_heads)
        if self.counts_logits:
            self.head_numbers = Tensor(np.arange(num_heads[0]), mstype.float32)
            self.clip_threshold = 3e38 if self.qk_clip is None else self.qk_clip.threshold.asnumpy()
            self.clip_threshold = Tensor(self.clip_threshold, mstype.float32)
        self.count_lengths = [counter.shape[0] for counter in counters[: len(counters) - len(num_heads)]]
        self.count_lengths += [3] * len(num_heads)
        places = np.split(np.eye(sum(self.count_lengths)), np.cumsum(self.count_lengths)[:-1])
        self.ones = Tensor(np.ones(sum(self.count_lengths)), mstype.float32)
        self.places = tuple(Tensor(rows, mstype.float32) for rows in places)
        self.count_shares = tuple(float(own or mesh.pp == 1) / mesh.stage_size for own in held)
        self.balancing = tuple(place for place, (_, cell) in enumerate(counting) if cell.balance_rate)
        balancing = [counting[place][1] for place in self.balancing]
        self.balanced = [cell.choices for cell in balancing]
        self.balance_rate = balancing[0].balance_rate if balancing else 0.0
        self.biases = ParameterTuple([cell.balance_bias for cell in self.balanced])

    def construct(self, *batch):
        if self.takes_gradients:  # see `Microbatch`
            loss, gradients = batch[0], batch[1:]
        else:
            loss, gradients = self.in_parts(*batch) if self.num_parts > 1 else self.at_once(*batch)
        if self.tells_loss:
            loss = self.all_reduce(loss) * self.of_stage
        accumulated = gradients
        if self.buffered:
            accumulated = ops.depend(self.accumulated, gradients)
        used = accumulated if self.reads_sums else gradients
        if self.scales_loss:
            used = self.map(ops.partial(_scale, 1.0 / self.loss_scale), used)
        used, counted = used[: self.num_weights], used[self.num_weights :]
        if self.scale != 1.0:
            loss, used = loss * self.scale, self.map(ops.partial(_scale, Tensor(self.scale, mstype.float32)), used)
        square = self.add_n(self.map(square_sum, self.shares, used))
        if self.all_reduce is not None:
            square = self.all_reduce(square)
        norm, overflow = self.sqrt(square), None
        if self.scales_loss:
            overflow = self.invert(self.is_finite(square))
            used = self.map(ops.partial(_keep, overflow), used)
        if self.clip:
            factor = self.max_norm / self.maximum(norm, self.max_norm)
            if self.scales_loss:
                factor = _keep_unless(overflow, factor)
            used = self.map(ops.partial(_scale, factor), used)
        updated = self.optimizer(used, overflow) if self.scales_loss else self.optimizer(used)
        if self.qk_clip is not None:
            updated = self.clipped(counted, updated, overflow)
        if self.averages is not None:
            updated = self.averages(updated, overflow) if self.scales_loss else self.averages(updated)
        loss = ops.depend(loss, updated)
        if not self.counts:
            return self.cleared(loss, accumulated, gradients, overflow), norm
        if self.balance_rate:
            loads = tuple([counted[place] for place in self.balancing])
            loads = self.map(ops.partial(_keep, overflow), loads) if self.scales_loss else loads
            loss = ops.depend(loss, self.map(ops.partial(_balance, self.balance_rate), self.biases, loads))
        if self.counts_logits:
            num_summed = self.num_summed - self.num_weights
            largest = self.map(ops.partial(_largest, self.clip_threshold, self.head_numbers), counted[num_summed:])
            counted = counted[:num_summed] + largest
        # A stage without experts gets its zeros here: MindSpore would leave out an all-reduce of known numbers.
        zero = self.to_float(self.less(square, 0.0), mstype.float32) * self.ones
        counts = self.add_n((zero, *self.map(_place, self.places, self.count_shares, counted)))
        if self.all_reduce is not None:
            counts = self.all_reduce(counts)
        return self.cleared(ops.depend(loss, counts), accumulated, gradients, overflow), norm, counts

    def clipped(self, counted, updated, overflow):
        """Clip the weights after an update. Returns a value that depends on both."""
        largest = counted[self.num_summed - self.num_weights :]
        return self.qk_clip(largest, updated, overflow) if self.scales_loss else self.qk_clip(largest, updated)

    def cleared(self, loss, accumulated, gradients, overflow):
        """The loss, after the sums of microbatches are 0 again."""
        if not self.buffered:
            return loss
        if self.scales_loss:
            return ops.depend(loss, self.map(ops.partial(_clear, overflow), accumulated, gradients))
        return ops.depend(loss, self.map(_clear, accumulated, gradients))

    def at_once(self, *batch):
        if self.scales_loss:
            return self.network(*batch), self.grad(self.network, self.trained)(*batch, self.loss_scale * 1.0)
        return self.network(*batch), self.grad(self.network, self.trained)(*batch)

    def in_parts(self, *batch):
        size = batch[0].shape[0] // self.num_parts
        loss, gradients = 0.0, None
        for i in range(self.num_parts):
            part = ()
            for x in batch:
                x = x[i * size : (i + 1) * size]
                part = (*part, x if gradients is None else ops.depend(x, gradients))  # one part after another
            part_loss, part_gradients = self.at_once(*part)
            loss = loss + part_loss
            gradients = part_gradients if gradients is None else self.combined(gradients, part_gradients)
        return loss, gradients

    def combined(self, gradients, more):
        """The sums of two parts' gradients and counts; of the largest logits the larger."""
        if not self.counts_logits:
            return self.map(_add, gradients, more)
        summed = self.map(_add, gradients[: self.num_summed], more[: self.num_summed])
        return summed + self.map(_larger, gradients[self.num_summed :], more[self.num_summed :])


class Microbatch(nn.Cell):
    """The first half of a `TrainStep`, which a schedule repeats: batch -> loss and gradients, one after the other.
    The step itself then is the second half: their sums -> its results."""

    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step
        step.takes_gradients = True

    def construct(self, *batch):
        loss, gradients = self.step.at_once(*batch)
        return (loss, *gradients)
