# SPDX-License-Identifier: Apache-2.0
"""A convolutional network with batch normalization, trained by MindSpore's Model, evaluated, and asked for a prediction:

python examples/image_classifier.py
msrun --worker_num=4 --local_worker_num=4 --join=True examples/image_classifier.py dp=4
"""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, Model

from sporeloom import auto_parallel, is_log_rank


class Classifier(nn.Cell):
    """Images (batch, 1, 8, 8) -> logits (batch, 2)."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.flatten, self.head = nn.Flatten(), nn.Dense(8 * 8 * 8, 2)

    def construct(self, image):
        return self.head(self.flatten(self.relu(self.norm(self.conv(image)))))


class Losses(Callback):
    def step_end(self, run_context):
        told = run_context.original_args()
        if is_log_rank():
            print(f"step {told.cur_step_num} loss {float(told.net_outputs.asnumpy()):.6f}", flush=True)


ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
rng = np.random.RandomState(0)
images = rng.randn(32, 1, 8, 8).astype(np.float32)
labels = (images.mean((1, 2, 3)) > 0).astype(np.int32)  # is it bright?

net = Classifier()
if len(sys.argv) > 1:
    axis, degree = sys.argv[1].split("=")
    net = auto_parallel(net, mesh={axis: int(degree)})  # the one line

loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
model = Model(net, loss, nn.Adam(net.trainable_params(), 1e-2), metrics={"accuracy"})
dataset = NumpySlicesDataset((images, labels), ["image", "label"], shuffle=False).batch(16)
model.train(3, dataset, callbacks=[Losses()], dataset_sink_mode=False)
found = model.eval(dataset, dataset_sink_mode=False)
first = model.predict(Tensor(images[:4])).asnumpy().argmax(1)
if is_log_rank():
    print(f"accuracy {found['accuracy']:.3f}; the first four are {first.tolist()}", flush=True)
