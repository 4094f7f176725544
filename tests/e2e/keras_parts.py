"""Every layer, loss and metric of Keras, in models small enough to be trained in a test.

`test_keras_parts.test_every_part_is_listed` finds parts of Keras that no table names. Parts that
the installed Keras lacks are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from nanotf.compat import versions
from nanotf.compat.versions import is_keras_3

L = tf.keras.layers

# Rows, and rows of a batch: uneven last batches and halves; even ones; batches of a row; one batch.
SIZES = {"uneven": (22, 9), "even": (24, 8), "rows": (3, 1), "one batch": (12, 12)}

# Layers by the shape of a row. A trained layer precedes each, and a `Dense` follows, so gradients
# flow through to its input.
LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Callable[[], Any]]]] = {
    "vectors": (
        (6,),
        {
            "Activation": lambda: L.Activation("gelu"),
            "ActivityRegularization": lambda: L.ActivityRegularization(0.01, 0.02),
            "AlphaDropout": lambda: L.AlphaDropout(0.3),
            "BatchNormalization": lambda: L.BatchNormalization(momentum=0.8),
            "Dense": lambda: L.Dense(4, "tanh", activity_regularizer="l2"),
            "Dropout": lambda: L.Dropout(0.4),
            "ELU": L.ELU,
            "Flatten": L.Flatten,
            "GaussianDropout": lambda: L.GaussianDropout(0.3),
            "GaussianNoise": lambda: L.GaussianNoise(0.3),
            "GroupNormalization": lambda: L.GroupNormalization(2),
            "Identity": lambda: _named("Identity")(),
            "Lambda": lambda: L.Lambda(tf.sin, output_shape=(6,)),
            "LayerNormalization": L.LayerNormalization,
            "LeakyReLU": L.LeakyReLU,
            "Normalization": lambda: L.Normalization(mean=0.3, variance=2.0),
            "PReLU": lambda: L.PReLU("he_normal"),
            "RMSNormalization": lambda: _named("RMSNormalization")(),
            "ReLU": lambda: L.ReLU(negative_slope=0.1),
            "RepeatVector": lambda: L.RepeatVector(2),
            "Rescaling": lambda: L.Rescaling(0.5, 0.1),
            "Reshape": lambda: L.Reshape((2, 3)),
            "Softmax": L.Softmax,
            "SpectralNormalization": lambda: _named("SpectralNormalization")(L.Dense(4)),
            "ThresholdedReLU": lambda: _named("ThresholdedReLU")(0.1),
            "UnitNormalization": lambda: L.UnitNormalization(),
            "CategoryEncoding": lambda: _whole_numbers(L.CategoryEncoding(5, "count")),
            "Discretization": lambda: _whole_numbers(L.Discretization([-1.0, 0.0, 1.0])),
            "HashedCrossing": lambda: _crossing(L.HashedCrossing(7, output_mode="one_hot")),
        },
    ),
    "sequences": (
        (8, 4),
        {
            "AdaptiveAveragePooling1D": lambda: _named("AdaptiveAveragePooling1D")(2),
            "AdaptiveMaxPooling1D": lambda: _named("AdaptiveMaxPooling1D")(2),
            "AveragePooling1D": lambda: L.AveragePooling1D(2),
            "Bidirectional": lambda: L.Bidirectional(L.LSTM(3, return_sequences=True)),
            "Conv1D": lambda: L.Conv1D(3, 3, padding="causal"),
            "Conv1DTranspose": lambda: L.Conv1DTranspose(3, 3),
            "Cropping1D": L.Cropping1D,
            "DepthwiseConv1D": lambda: L.DepthwiseConv1D(3),
            "EinsumDense": lambda: L.EinsumDense("abc,cd->abd", (8, 3), bias_axes="d"),
            "GRU": lambda: L.GRU(3, dropout=0.2),
            "GlobalAveragePooling1D": L.GlobalAveragePooling1D,
            "GlobalMaxPool1D": L.GlobalMaxPool1D,
            # Keras 2 draws it in a loop whose iterations overlap: another number in each run.
            "LSTM": lambda: L.LSTM(3, recurrent_dropout=0.2 if is_keras_3() else 0.0),
            "Masking": lambda: _masked(L.LSTM(3)),
            "MaxPool1D": L.MaxPool1D,
            "Permute": lambda: L.Permute((2, 1)),
            "RNN": lambda: L.RNN(L.SimpleRNNCell(3)),
            "StackedRNNCells": lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(3), L.LSTMCell(2)])),
            "LocallyConnected1D": lambda: _named("LocallyConnected1D")(2, 3),
            "SeparableConv1D": lambda: L.SeparableConv1D(3, 3),
            "SimpleRNN": lambda: L.SimpleRNN(3, return_sequences=True),
            "SpatialDropout1D": lambda: L.SpatialDropout1D(0.3),
            "TimeDistributed": lambda: L.TimeDistributed(L.BatchNormalization()),
            "UpSampling1D": L.UpSampling1D,
            "ZeroPadding1D": L.ZeroPadding1D,
            "AdditiveAttention": lambda: _with_itself(L.AdditiveAttention(dropout=0.2)),
            "Attention": lambda: _with_itself(L.Attention(use_scale=True)),
            "GroupQueryAttention": lambda: _with_itself(_named("GroupQueryAttention")(3, 2, 1)),
            "MultiHeadAttention": lambda: _with_itself(L.MultiHeadAttention(2, 3, dropout=0.2)),
        },
    ),
    "images": (
        (8, 8, 3),
        {
            "AdaptiveAveragePooling2D": lambda: _named("AdaptiveAveragePooling2D")(2),
            "AdaptiveMaxPooling2D": lambda: _named("AdaptiveMaxPooling2D")(2),
            "AveragePooling2D": lambda: L.AveragePooling2D(2),
            "CenterCrop": lambda: L.CenterCrop(4, 6),
            "Conv2D": lambda: L.Conv2D(4, 3, strides=2, groups=1),
            "Conv2DTranspose": lambda: L.Conv2DTranspose(2, 3),
            "Cropping2D": L.Cropping2D,
            "DepthwiseConv2D": lambda: L.DepthwiseConv2D(3),
            "GlobalAveragePooling2D": L.GlobalAveragePooling2D,
            "GlobalMaxPool2D": L.GlobalMaxPool2D,
            "LocallyConnected2D": lambda: _named("LocallyConnected2D")(2, 3),
            "MaxPool2D": L.MaxPool2D,
            "Resizing": lambda: L.Resizing(5, 6),
            "SeparableConv2D": lambda: L.SeparableConv2D(3, 3),
            "SpatialDropout2D": lambda: L.SpatialDropout2D(0.3),
            "UpSampling2D": lambda: L.UpSampling2D(interpolation="bilinear"),
            "ZeroPadding2D": L.ZeroPadding2D,
            "ConvLSTM1D": lambda: L.ConvLSTM1D(2, 3),
        },
    ),
    "volumes": (
        (4, 5, 4, 2),
        {
            "AdaptiveAveragePooling3D": lambda: _named("AdaptiveAveragePooling3D")(
                2, dtype="float32"
            ),
            "AdaptiveMaxPooling3D": lambda: _named("AdaptiveMaxPooling3D")(2, dtype="float32"),
            "AveragePooling3D": lambda: L.AveragePooling3D(2, dtype="float32"),
            "Conv3D": lambda: L.Conv3D(2, 2),
            "Conv3DTranspose": lambda: L.Conv3DTranspose(2, 2),
            "ConvLSTM2D": lambda: L.ConvLSTM2D(2, 3),
            "Cropping3D": L.Cropping3D,
            "GlobalAveragePooling3D": L.GlobalAveragePooling3D,
            "GlobalMaxPool3D": L.GlobalMaxPool3D,
            "MaxPool3D": lambda: L.MaxPool3D(dtype="float32"),
            "SpatialDropout3D": lambda: L.SpatialDropout3D(0.3),
            "UpSampling3D": L.UpSampling3D,
            "ZeroPadding3D": L.ZeroPadding3D,
        },
    ),
    "sequences of volumes": ((2, 3, 4, 3, 2), {"ConvLSTM3D": lambda: L.ConvLSTM3D(2, 2)}),
}

# Layers for images of numbers from 0 to 255, without gradients everywhere: first in their model.
AUGMENTATIONS: dict[str, Callable[[], Any]] = {
    "RandomBrightness": lambda: L.RandomBrightness(0.3),
    "RandomContrast": lambda: L.RandomContrast(0.3),
    "RandomCrop": lambda: L.RandomCrop(5, 6),
    "RandomFlip": lambda: L.RandomFlip("horizontal"),
    "RandomRotation": lambda: L.RandomRotation(0.2),
    "RandomTranslation": lambda: L.RandomTranslation(0.2, 0.1),
    "RandomZoom": lambda: L.RandomZoom(0.2),
    "RandomHeight": lambda: L.RandomHeight(0.2),
    "RandomWidth": lambda: L.RandomWidth(0.2),
    "AugMix": lambda: _named("AugMix")(),
    "AutoContrast": lambda: _named("AutoContrast")(),
    "CutMix": lambda: _named("CutMix")(),
    "Equalization": lambda: _named("Equalization")(),
    "MixUp": lambda: _named("MixUp")(),
    "RandAugment": lambda: _named("RandAugment")(),
    "RandomColorDegeneration": lambda: _named("RandomColorDegeneration")(0.5),
    "RandomColorJitter": lambda: _named("RandomColorJitter")((0, 255), 0.3, 0.3, 0.3, 0.3),
    "RandomErasing": lambda: _named("RandomErasing")(0.5),
    "RandomGaussianBlur": lambda: _named("RandomGaussianBlur")(0.5),
    "RandomGrayscale": lambda: _named("RandomGrayscale")(0.5),
    "RandomHue": lambda: _named("RandomHue")(0.3),
    "RandomInvert": lambda: _named("RandomInvert")(0.5),
    "RandomPerspective": lambda: _named("RandomPerspective")(0.5),
    "RandomPosterization": lambda: _named("RandomPosterization")(4),
    "RandomSaturation": lambda: _named("RandomSaturation")(0.3),
    "RandomSharpness": lambda: _named("RandomSharpness")(0.5),
    "Solarization": lambda: _named("Solarization")(),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda: _named(
        "ContrastLimitedAdaptiveHistogramEqualization"
    )(),
}

# Layers with several inputs, each of its own shape.
MERGING = ("Add", "Average", "Concatenate", "Dot", "Maximum", "Minimum", "Multiply", "Subtract")

# Layers of integers and of strings, by the number of values in a row.
OF_NUMBERS: dict[str, Callable[[], Any]] = {
    "Embedding": lambda: L.Embedding(20, 3, mask_zero=True),
    "Hashing": lambda: _embedded(L.Hashing(7)),
    "IntegerLookup": lambda: _embedded(L.IntegerLookup(vocabulary=[3, 5, 7])),
    "ReversibleEmbedding": lambda: _named("ReversibleEmbedding")(20, 3),
}
OF_TEXTS: dict[str, Callable[[], Any]] = {
    "StringLookup": lambda: _embedded(L.StringLookup(vocabulary=["a", "b"])),
    "TextVectorization": lambda: _embedded(
        L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=4)
    ),
}
OF_SIGNALS: dict[str, Callable[[], Any]] = {
    "MelSpectrogram": lambda: (
        lambda x: _named("MelSpectrogram")(
            num_mel_bins=4, fft_length=16, sequence_stride=8, sampling_rate=1000, min_freq=10
        )(L.Flatten()(x))
    ),
    "STFTSpectrogram": lambda: _named("STFTSpectrogram")(
        "real", frame_length=8, frame_step=4, fft_length=8
    ),
}

# Abstract classes, parts or containers of other layers, layers without a function of rows, or
# layers of other frameworks.
NO_LAYERS = {
    "AbstractRNNCell", "DenseFeatures", "FlaxLayer", "GRUCell", "InputLayer", "JaxLayer",
    "LSTMCell", "Layer", "MaxNumBoundingBoxes", "Pipeline", "SimpleRNNCell", "TFSMLayer",
    "TorchModuleWrapper", "Wrapper",
}  # fmt: skip

# Keras 3.15 distorts all images like the first image if their number is unknown. It cannot make the
# second layer from its configuration.
NO_LAYERS |= {"RandomElasticTransform", "RandomShear"}
if versions.keras_version() < (2, 16):
    NO_LAYERS |= {"SpectralNormalization"}  # asks a tensor for its truth, in graphs

# Layers that mix the rows of a batch or look at all of them, and those whose operations no rule of
# the proof knows. "Functional" is what their model computes between its layers with weights.
WHOLE = {
    "AugMix", "CTC", "ContrastLimitedAdaptiveHistogramEqualization", "CutMix", "Equalization",
    "Functional", "HashedCrossing", "MelSpectrogram", "MixUp", "RandAugment",
    "TextVectorization",
}  # fmt: skip
# They look at all rows: Hinge asks whether all targets are 0 or 1.
WHOLE_LOSSES = {"Circle", "Dice", "Hinge", "SquaredHinge", "Tversky"}
if not is_keras_3():
    WHOLE |= {"CenterCrop", "RandomContrast", "RandomCrop"}

# Losses, each with the kind of its model's output and targets; see `targets`.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "BinaryCrossentropy": ("probabilities", {"label_smoothing": 0.1}),
    "BinaryFocalCrossentropy": ("probabilities", {}),
    "CTC": ("texts", {}),
    "CategoricalCrossentropy": ("classes", {}),
    "CategoricalFocalCrossentropy": ("classes", {}),
    "CategoricalGeneralizedCrossEntropy": ("numbers of classes", {}),
    "CategoricalHinge": ("classes", {}),
    "Circle": ("numbers of classes", {}),
    "CosineSimilarity": ("values", {}),
    "Dice": ("probabilities", {}),
    "Hinge": ("values", {}),
    "Huber": ("values", {"delta": 0.5}),
    "KLDivergence": ("classes", {}),
    "LogCosh": ("values", {}),
    "MeanAbsoluteError": ("values", {}),
    "MeanAbsolutePercentageError": ("values", {}),
    "MeanSquaredError": ("values", {}),
    "MeanSquaredLogarithmicError": ("probabilities", {}),
    "Poisson": ("probabilities", {}),
    "SparseCategoricalCrossentropy": ("numbers of classes", {}),
    "SquaredHinge": ("values", {}),
    "Tversky": ("probabilities", {}),
}

METRICS: dict[str, tuple[str, dict[str, Any]]] = {
    "AUC": ("probabilities", {}),
    "Accuracy": ("classes", {}),
    "BinaryAccuracy": ("probabilities", {}),
    "BinaryCrossentropy": ("probabilities", {}),
    "BinaryIoU": ("probabilities", {}),
    "CategoricalAccuracy": ("classes", {}),
    "CategoricalCrossentropy": ("classes", {}),
    "CategoricalHinge": ("classes", {}),
    "ConcordanceCorrelation": ("values", {}),
    "CosineSimilarity": ("values", {}),
    "F1Score": ("classes", {}),
    "FBetaScore": ("classes", {"beta": 2.0}),
    "FalseNegatives": ("probabilities", {}),
    "FalsePositives": ("probabilities", {}),
    "Hinge": ("values", {}),
    "IoU": ("probabilities", {"num_classes": 2, "target_class_ids": [0]}),
    "KLDivergence": ("classes", {}),
    "LogCoshError": ("values", {}),
    "MeanAbsoluteError": ("values", {}),
    "MeanAbsolutePercentageError": ("values", {}),
    "MeanIoU": ("probabilities", {"num_classes": 2}),
    "MeanRelativeError": ("values", {"normalizer": [1.0, 2.0, 3.0]}),
    "MeanSquaredError": ("values", {}),
    "MeanSquaredLogarithmicError": ("probabilities", {}),
    "OneHotIoU": ("classes", {"num_classes": 3, "target_class_ids": [0, 2]}),
    "OneHotMeanIoU": ("classes", {"num_classes": 3}),
    "PearsonCorrelation": ("values", {}),
    "Poisson": ("probabilities", {}),
    "Precision": ("probabilities", {}),
    "PrecisionAtRecall": ("probabilities", {"recall": 0.5}),
    "R2Score": ("values", {}),
    "Recall": ("probabilities", {}),
    "RecallAtPrecision": ("probabilities", {"precision": 0.5}),
    "RootMeanSquaredError": ("values", {}),
    "SensitivityAtSpecificity": ("probabilities", {"specificity": 0.5}),
    "SparseCategoricalAccuracy": ("numbers of classes", {}),
    "SparseCategoricalCrossentropy": ("numbers of classes", {}),
    "SpecificityAtSensitivity": ("probabilities", {"sensitivity": 0.5}),
    "SquaredHinge": ("values", {}),
    "TrueNegatives": ("probabilities", {}),
    "TruePositives": ("probabilities", {}),
}

NO_LOSSES = {"Loss"}
NO_METRICS = {"Metric", "Mean", "MeanMetricWrapper", "MeanTensor", "Sum", "SumOverBatchSize"}
NO_METRICS |= {"SumOverBatchSizeMetricWrapper"}
NO_METRICS |= {"SparseTopKCategoricalAccuracy", "TopKCategoricalAccuracy"}  # not in float64


def installed(table: Mapping[str, Any], module: Any = L) -> dict[str, Any]:
    """Returns the entries of a table that the installed Keras has and can train."""
    names = [name for name in table if hasattr(module, name) and name not in NO_LAYERS]
    return {name: table[name] for name in names}


def classes_in(module: Any, base: type) -> list[set[str]]:
    """Returns the names of all public classes of a Keras module."""
    found: dict[type, set[str]] = {}
    for name, value in inspect.getmembers(module, inspect.isclass):
        if issubclass(value, base) and not name.startswith("_"):
            found.setdefault(value, set()).add(name)
    return list(found.values())


def _named(name: str) -> Any:
    return getattr(L, name)


def _whole_numbers(layer: Any) -> Callable[[Any], Any]:
    """Wraps the layer, which gets integers from 0 to 4."""
    return lambda x: layer(L.Lambda(_to_numbers, output_shape=(6,))(x))


def _to_numbers(x: Any) -> Any:
    return tf.cast(tf.clip_by_value(tf.abs(x) * 2, 0, 4), "int32")


def _crossing(layer: Any) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        numbers = L.Lambda(lambda x: _to_numbers(x)[:, :1], output_shape=(1,))(x)
        return layer((numbers, numbers))

    return call


def _masked(layer: Any) -> Callable[[Any], Any]:
    return lambda x: layer(L.Masking()(L.ReLU()(x)))


def _with_itself(layer: Any) -> Callable[[Any], Any]:
    """Wraps the layer, which attends to its own input."""
    if isinstance(layer, (L.Attention, L.AdditiveAttention)):
        return lambda x: layer([x, x])
    return lambda x: layer(x, x)


def _embedded(layer: Any) -> Callable[[Any], Any]:
    return lambda x: L.Embedding(20, 3)(layer(x))
