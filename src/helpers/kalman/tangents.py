r"""Tangents of the readable text: what it computes, and what that moves by along a direction.

A tangent dX is what X moves by when the model moves along a direction.  The tangent of the gradient
along a direction is the Hessian times that direction (Pearlmutter 1994, Fast exact multiplication
by the Hessian, doi:10.1162/neco.1994.6.1.147).  It has no text of its own: the lines of
:mod:`helpers.kalman.recursions` are run on matrices that move, :class:`Moving`, whose operators
follow the product rule.
"""

from helpers.kalman import recursions

__all__ = ["Moving", "still"]


class Moving:
    """A matrix, a vector or a number, and what it moves by: X and dX, of the same shape.

    Beside operators of NumPy's, numbers and arrays are those that do not move.
    """

    __array_ufunc__ = None  # arrays leave operators to this class

    def __init__(self, X, dX):  # noqa: N803
        self.X, self.dX = X, dX

    def _each(self, function):
        return Moving(function(self.X), function(self.dX))

    def __add__(self, other):
        moved = self.dX + other.dX if isinstance(other, Moving) else self.dX
        return Moving(self.X + still(other), moved)

    def __mul__(self, other):
        moved = self.dX * still(other)
        if isinstance(other, Moving):
            moved = moved + self.X * other.dX
        return Moving(self.X * still(other), moved)

    def __matmul__(self, other):
        moved = self.dX @ still(other)
        if isinstance(other, Moving):
            moved = moved + self.X @ other.dX
        return Moving(self.X @ still(other), moved)

    def __rmatmul__(self, other):
        return self._each(lambda X: other @ X)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other):
        return self + -1.0 * other

    def __rsub__(self, other):
        return -1.0 * self + other

    def __neg__(self):
        return -1.0 * self

    def __truediv__(self, number):
        return self._each(lambda X: X / number)

    def __getitem__(self, key):
        return self._each(lambda X: X[key])

    def __len__(self):
        return len(self.X)

    @property
    def shape(self):
        return self.X.shape

    @property
    def T(self):  # noqa: N802
        return self._each(lambda X: X.T)

    def sum(self):
        return self._each(lambda X: X.sum())

    def trace(self):
        return self._each(lambda X: X.trace())


def still(x):
    """x without what it moves by."""
    return x.X if isinstance(x, Moving) else x


@recursions.rows.register
def _(X: Moving, o):  # noqa: N803
    return X._each(lambda A: recursions.rows(A, o))


class Gain(Moving):
    """G, and what else moves J = I - G'S = I - Kf Z."""

    def __init__(self, G, dG, Kf, Z):  # noqa: N803
        super().__init__(G, dG)
        self.Kf, self.Z = Kf, Z


@recursions.inverse_factor.register
def _(F: Moving, o, I_p):  # noqa: N803
    """From d(F^-1) = -F^-1 dF F^-1.

    C^-1 occurs only where a rotation of its rows cancels, and so half of that is what it moves by.
    """
    C_inv, logdet = recursions.inverse_factor(F.X, o, still(I_p))
    dE = recursions.symmetric(C_inv @ F.dX @ C_inv.T)
    return Moving(C_inv, -(dE @ C_inv) / 2), Moving(logdet, dE.trace())


# The product rule on these three lines would lose as many digits as P0 has that are vague. Kf moves
# by (dM - Kf dF) F^-1, with M = P Z', and P_filt by no more than it does where Kf stays as it is,
# which is the best there is: the difference of large numbers comes before F^-1, not after it.
@recursions.update_covariance.register
def _(P: Moving, Z, ZP, F, C_inv):  # noqa: N803
    G, Kf, P_filt = recursions.update_covariance(P.X, Z.X, ZP.X, F.X, C_inv.X)
    dM, dF = ZP.dX.T, F.dX
    dKf = (dM - Kf @ dF) @ C_inv.X.T @ C_inv.X
    dP_filt = P.dX + Kf @ dF @ Kf.T - recursions.with_transposed(dM @ Kf.T)
    Kf = Moving(Kf, dKf)
    return Gain(G, (C_inv @ ZP).dX, Kf, Z), Kf, Moving(P_filt, dP_filt)


@recursions.joseph.register
def _(X: Moving, Z, H, Kf):  # noqa: N803
    return Moving(recursions.joseph(X.X, Z.X, H.X, Kf.X), X.dX)


@recursions.times_J.register
def _(G: Gain, S, X):  # noqa: N803
    Kf, Z, A = G.Kf, G.Z, still(X)
    moved = -(A @ Kf.dX) @ Z.X - (A @ Kf.X) @ Z.dX
    if isinstance(X, Moving):
        moved = moved + recursions.times_J(G.X, S.X, X.dX)
    return Moving(recursions.times_J(G.X, S.X, A), moved)
