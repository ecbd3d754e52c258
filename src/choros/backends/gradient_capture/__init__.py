"""Capture of the gradients of a ``train_step``, by a stand-in for ``optimizer.apply``.

The trainers of PyTorch and TensorFlow pass the gradients to ``optimizer.apply``. User-defined ``train_step`` methods
do so too, as ``apply_gradients`` calls it. JAX uses ``optimizer.stateless_apply`` and does not need this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from choros.backends import step_counter
from choros.backends.optimizers import held_optimizers
from choros.errors import InexactLossError

if TYPE_CHECKING:
    import keras


class Capture:
    """A context in which ``model.optimizer.apply`` stores the gradients and does not update.

    Args:
        model: the compiled and built model.
        trainable: its trainable variables, in the order of the result of ``gradients``.
        wrap: wraps the stand-in, for example to exclude it from compilation. Defaults to no wrapper.
        where: returns the graph in which a step runs (TensorFlow). Gradients from another graph are refused.
    """

    def __init__(
        self,
        model: keras.Model,
        trainable: list[Any],
        wrap: Callable[[Any], Any] = lambda hook: hook,
        where: Callable[[], Any] = lambda: None,
    ) -> None:
        self._model = model
        self._order = trainable
        self._index = {id(v): i for i, v in enumerate(trainable)}
        self._hook = wrap(self._take)
        self._where = where
        self._here: object = None
        self._taken: list[Any] | None = None
        self._refusal: InexactLossError | None = None
        self._before: list[Any] = []
        self.shifts: list[float] = []  # added to the weights, to find out whether the step reads weights afterwards
        self.then: Callable[[], None] = lambda: None  # called after the step has passed its gradients
        self.gives: list[Any] | None = None  # gradients for the real optimizer, instead of those of the step

    def __enter__(self) -> Capture:
        refuse_other_optimizers(self._model)
        self._taken = self._refusal = None
        self._here = self._where()
        attributes = vars(self._model.optimizer)
        self._before = (
            [attributes["apply"]] if "apply" in attributes else []
        )  # set by ``hvd.DistributedOptimizer``, for example
        attributes["apply"] = self._hook
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # The stand-in is an attribute of the instance. Without it, the method of the class is found again.
        vars(self._model.optimizer).pop("apply", None)
        for before in self._before:
            vars(self._model.optimizer)["apply"] = before
        refusal = self._refusal
        self._taken = self._here = self._refusal = None
        if refusal is not None and error is not refusal:  # TensorFlow wraps an error from inside its functions
            raise refusal from error

    def gradients(self) -> list[Any]:
        """Return the step's gradient for each trainable variable; None if the loss does not depend on the variable.

        Raises:
            InexactLossError: the step did not call the compiled optimizer.
        """
        if self._taken is None and not self._order:  # all weights are frozen: Keras' steps do not call the optimizer
            return []
        if self._taken is None:
            self._refuse(
                "does not update through the compiled optimizer (self.optimizer.apply), so there are no gradients to "
                "reduce: call it once in each step, or use another algorithm than AllReduce."
            )
        return self._taken

    def _take(self, grads: Any, trainable_variables: Any = None) -> None:
        if self._taken is not None:
            self._refuse(
                "calls the optimizer more than once in a step; AllReduce reduces one gradient a step. "
                "Call self.optimizer.apply once, or use another algorithm."
            )
        if self._where() is not self._here:
            self._refuse(
                "calls the optimizer inside its own tf.function, tf.cond or loop, out of which the gradients cannot "
                "be taken: call it at the top level of train_step, or use another algorithm."
            )
        taken: list[Any] = [None] * len(self._order)
        for gradient, variable in zip(grads, trainable_variables or self._order, strict=True):
            if id(variable) not in self._index:
                name = getattr(variable, "path", variable)
                self._refuse(
                    f"trains {name!r}, not a trainable variable of the model: add it, or use another algorithm."
                )
            taken[self._index[id(variable)]] = gradient
        self._taken = taken
        if any(self.shifts):
            step_counter(self._model.optimizer).assign_add(1)
            for variable, shift in zip(self._order, self.shifts, strict=True):
                variable.assign(variable + shift)
        if self.gives is not None:
            self._update(self.gives)
        self.then()

    def _update(self, grads: list[Any]) -> None:
        """Run the real optimizer on these gradients, in the order of the trainable variables."""
        attributes = vars(self._model.optimizer)
        # The call below must reach the real method.
        attributes.pop("apply")
        for before in self._before:
            attributes["apply"] = before
        try:
            self._model.optimizer.apply(grads, self._order)
        finally:
            attributes["apply"] = self._hook

    def _refuse(self, why: str) -> NoReturn:
        self._refusal = InexactLossError(f"The train_step of {type(self._model).__name__} {self._model.name!r} {why}")
        raise self._refusal


def refuse_other_optimizers(model: keras.Model) -> None:
    """Refuse a model that holds an optimizer besides the compiled one.

    Raises:
        InexactLossError: the model holds one. The message contains the name of its attribute.
    """
    for name in held_optimizers(model):
        raise InexactLossError(
            f"Model {model.name!r} holds a second optimizer, {name!r}, whose updates AllReduce would not "
            "reduce: use one compiled optimizer, or another algorithm."
        )
