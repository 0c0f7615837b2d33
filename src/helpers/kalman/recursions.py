r"""The Kalman filter's step and its pullback, once: what every engine of this package runs.

The lines below hold operators (``@ .T + *``) and four named functions, ``cholesky``, ``solve``,
``inverse_factor`` and ``rows``. NumPy runs them as they stand (:mod:`helpers.kalman.reference`),
PyTensor and JAX inside their scans (:mod:`helpers.kalman.scan`, :mod:`helpers.kalman.jax.scans`,
which register the functions for their own arrays), and Numba compiles them for few states
(:mod:`helpers.kalman.compiled.small`). For more, :mod:`helpers.kalman.compiled.step` writes them
out as calls of tiles: change a sign here, and every engine changes.

Everything is in *factors*: with C the Cholesky factor of the innovation covariance F,

.. math::

   S = C^{-1} Z, \quad G = C^{-1} Z P, \quad w = C^{-1} v, \\
   K_f^\top = C^{-\top} G, \quad u = C^{-\top} w, \\ J = I - K_f Z = I - G^\top S

and F^-1 itself stands in the gradient of H alone. A gain from a formed F^-1 would lose
eps kappa^2 of the gradients of T and Z under a start P0 = kappa I, where this form loses
eps kappa (chapter "Where digits die").

A missing component is one whose row of Z, entry of d, and row and column of H are zero; C has a
one on the diagonal there. All that is computed for it comes out zero.

Vectors have one axis. ``o`` (p,) is 1.0 where y is observed and 0.0 where it is not; ``I_p`` is the
identity matrix. The source of the step's pullback is Parellier, Barrau and Bonnabel
(2023), doi:10.1109/TAC.2023.3297879, equations 20-31, of the smoother's form de Jong (1988),
doi:10.1093/biomet/75.3.594, and Koopman and Shephard (1992), doi:10.1093/biomet/79.4.823.
"""

from functools import singledispatch

import numpy as np

LOG_2PI = float(np.log(2 * np.pi))

# What a covariance that is taken to be in its steady state may miss, relative to its own size.
TOLERANCE = 1e-13

# Pivot of a scaled S, for each of its rows, of a direction that the data tell of.
LEAST = 1e-12

# F is singular where the others of its step leave less than so many roundings of a variance: where
# nothing is left, rounding alone leaves up to seven. No answer there would have two digits.
LEAST_LEFT = 16


@singledispatch
def cholesky(F):
    """The lower factor C of F = C C' (p, p), and log|F|.

    Complex F is taken as symmetric, not Hermitian, as a complex step needs it.

    Raises
    ------
    numpy.linalg.LinAlgError
        If F is not positive definite (NumPy; the other engines answer NaN).
    """
    if not np.iscomplexobj(F):
        C = np.linalg.cholesky(F)
        return C, 2 * np.log(np.diag(C)).sum()
    C = np.zeros_like(F)
    for j in range(len(F)):
        pivot = F[j, j] - C[j, :j] @ C[j, :j]
        if not pivot.real > 0:
            raise np.linalg.LinAlgError("Matrix is not positive definite")
        C[j, j] = np.sqrt(pivot)
        C[j + 1 :, j] = (F[j + 1 :, j] - C[j + 1 :, :j] @ C[j, :j]) / C[j, j]
    return C, 2 * np.log(np.diag(C)).sum()


@singledispatch
def solve(C, B):
    """C^-1 B for a lower triangular C (p, p) and B (p, k), by forward substitution."""
    X = np.zeros_like(B)
    for i in range(len(C)):
        X[i] = (B[i] - C[i, :i] @ X[:i]) / C[i, i]
    return X


@singledispatch
def inverse_factor(F, o, I_p):
    """C^-1 (p, p) for F = C C' (p, p), zero where o is, and log|F|, of what is observed."""
    F = F + I_p * (1 - o)
    C, logdet = cholesky(F)
    # The inverse of a triangular factor is as good as solves with it; that of F would not be.
    C_inv = solve(C, I_p) * o
    # 1 / (F_ii F^-1_ii) is the share of a variance that the others leave.
    inflated = (F * I_p).sum(axis=0) * (C_inv * C_inv).sum(axis=0)
    return C_inv, unless_singular(logdet, inflated.max())


def most_inflated(dtype):
    """From where on F_ii F^-1_ii says that F, of this type, is singular up to rounding."""
    return 1 / (LEAST_LEFT * np.finfo(dtype).eps)


@singledispatch
def unless_singular(logdet, inflated):
    """log|F|, unless F is singular up to rounding, where the largest F_ii F^-1_ii is `inflated`.

    Raises
    ------
    numpy.linalg.LinAlgError
        If it is (NumPy; the other engines answer NaN).
    """
    if not inflated.real < most_inflated(inflated.dtype):
        raise np.linalg.LinAlgError("Matrix is singular up to rounding")
    return logdet


@singledispatch
def rows(X, o):
    """X (p,) or (p, k) with zeros in the rows in which o is zero, whatever stands there."""
    return np.where((o != 0).reshape(-1, *[1] * (X.ndim - 1)), X, 0)


def factor_if_identified(S):
    """C (q, q) with C C' = S, and log|S|: NaN where S is singular, its diagonal scaled to ones.

    S holds what data say about q unknown numbers; it is singular where they say nothing about some
    combination of them.
    """
    q = len(S)
    C, logdet = np.zeros((q, q)), 0.0
    for j in range(q):
        x = S[j, j]
        for l in range(j):
            x -= C[j, l] ** 2
        if not x > q * LEAST * S[j, j]:
            return C, np.nan
        logdet += np.log(x)
        C[j, j] = np.sqrt(x)
        for i in range(j + 1, q):
            x = S[i, j]
            for l in range(j):
                x -= C[i, l] * C[j, l]
            C[i, j] = x / C[j, j]
    return C, logdet


def at_step(A, t):
    """The array of step t of A (1 or n, ...): the only one, if it does not vary."""
    return A[t if len(A) > 1 else 0]


def symmetric(X):
    """The symmetric part of a square matrix."""
    return (X + X.T) / 2


def with_transposed(X):
    """X + X' of a square matrix."""
    return X + X.T


def outer(x, y):
    """x y' for vectors."""
    return x[:, None] * y[None, :]


def mask(o, d, Z, H):
    """d (p,), Z (p, m), H (p, p) with zeros where a component is missing; H symmetric.

    What the model says of a component that is missing does not count, even if it is NaN.
    """
    return rows(d, o), rows(Z, o), rows(rows(symmetric(H), o).T, o)


def filtered(P, G):
    """P_filt = P - G'G (m, m), which loses digits where it leaves little of a variance."""
    return P - G.T @ G


def gains(o, P, Z, H, I_p):
    """What the update makes of the covariances alone.

    Returns F (p, p), log|F|, C^-1 (p, p; zero where missing), G (p, m), the filter gain Kf (m, p)
    and `filtered` (m, m).
    """
    ZP = Z @ P
    F = symmetric(ZP @ Z.T + H)
    C_inv, logdet = inverse_factor(F, o, I_p)
    return F, logdet, C_inv, *update_covariance(P, Z, ZP, F, C_inv)


@singledispatch
def update_covariance(P, Z, ZP, F, C_inv):
    """G (p, m), Kf (m, p) and P_filt (m, m), as `gains` returns them."""
    G = C_inv @ ZP
    Kf = G.T @ C_inv  # def-filter-gain
    return G, Kf, filtered(P, G)


@singledispatch
def joseph(X, Z, H, Kf):
    """P_filt (m, m) in Joseph's form J P J' + Kf H Kf' from X = P - G'G: no digits are lost.

    By products of rank p, and no difference of large numbers is left.
    """
    return symmetric(X - (X @ Z.T - Kf @ H) @ Kf.T)


def factor(o, P, Z, H, I_p):
    """:func:`gains` with P_filt in Joseph's form, and what other cotangents than those of l need.

    Returns F (p, p), log|F|, C^-1 (p, p), S = C^-1 Z (p, m), Kf (m, p), G (p, m) and P_filt (m, m).
    """
    F, logdet, C_inv, G, Kf, X = gains(o, P, Z, H, I_p)
    return F, logdet, C_inv, C_inv @ Z, Kf, G, joseph(X, Z, H, Kf)


def update(y, o, a, d, Z, logdet, C_inv, G):
    """What the update does to the mean, and the step's log-likelihood.

    y, d and Z are zero where a component is missing. Returns y_hat (p,), w (p,), u = F^-1 v (p,),
    a_filt (m,) and l.
    """
    y_hat = Z @ a + d  # eq-filter-update
    w = C_inv @ (y - y_hat)
    l = -(LOG_2PI * o.sum() + logdet + w @ w) / 2  # eq-filter-loglik
    return y_hat, w, w @ C_inv, a + w @ G, l


def update_columns(y, a, Z, C_inv, Kf):
    """:func:`update` for many series that share their gaps, less d: y (p, J), a (m, J).

    Returns w (p, J) and a_filt (m, J).
    """
    v = y - Z @ a
    return C_inv @ v, a + Kf @ v


def predict(a_filt, P_filt, c, T, W):
    """a (m,) and P (m, m) of the next step; W = R Q R'."""
    return T @ a_filt + c, symmetric(T @ P_filt @ T.T + W)  # eq-filter-predict


@singledispatch
def times_J(G, S, X):  # noqa: N802
    """X J = X (I - G'S), for X (m,) or (k, m)."""
    return X - (X @ G.T) @ S


def pull_predict(a_bar, P_bar, T, a_filt, P_bar_T_P):
    """The pullback of :func:`predict`; P_bar is symmetric, P_bar_T_P = P_bar T P_filt.

    Returns T_bar (m, m) and the cotangents of a_filt (m,) and P_filt (m, m); those of c and W are
    a_bar and P_bar.
    """
    return (
        outer(a_bar, a_filt) + 2 * P_bar_T_P,
        a_bar @ T,  # eq-backprop-predict-a
        symmetric(T.T @ (P_bar @ T)),  # eq-backprop-predict-P
    )


def pull_update(s, Pt, g, w, u, C_inv, S, Kf, G, a_filt, P_s, Pt_P):
    """The pullback of the update for cotangents s (m,) of a_filt, Pt (m, m) of P_filt and g of l.

    Pt is symmetric; P_s = P_filt s and Pt_P = Pt P_filt. Returns e (p,), which is d_bar and -y_bar,
    Z_bar (p, m), H_bar (p, p), and the cotangents of a (m,) and P (m, m).
    """
    k, b, z = s @ Kf, times_J(G, S, s), w @ S
    e = g * u - k
    Z_bar = outer(e, a_filt) + outer(u, P_s) - 2 * Kf.T @ Pt_P - g * Kf.T  # eq-ten-Z-filtered
    H_bar = (  # eq-backprop-H
        symmetric(Kf.T @ Pt @ Kf - outer(k, u)) + g / 2 * (outer(u, u) - C_inv.T @ C_inv)
    )
    JPJ = times_J(G, S, times_J(G, S, Pt).T)
    P_bar = symmetric(JPJ + outer(b + g / 2 * z, z) - g / 2 * S.T @ S)
    return e, Z_bar, H_bar, b + g * z, P_bar  # eq-backprop-update-P


def pull_observed(yhat_bar, F_bar, a, P, Z):
    """What cotangents of y_hat (p,) and F (p, p; symmetric) add to those of d, Z, H, a and P."""
    Z_bar = outer(yhat_bar, a) + 2 * F_bar @ Z @ P
    return yhat_bar, Z_bar, F_bar, yhat_bar @ Z, Z.T @ F_bar @ Z


def pull_columns(rho, T, w, C_inv, S, Kf, G, P_filt, A_filt):
    """One step back for columns of the start that are integrated out, or for many series.

    From rho (m, q) after the step, the columns' w = C^-1 Z A (p, q) and A_filt (m, q). Returns
    eE (p, q), aE (m, q) and rho before the step: what e, the smoothed mean and r are to a series.
    With r, w and -a_filt of series in the columns they are these themselves.
    """
    s = T.T @ rho
    return C_inv.T @ w - Kf.T @ s, P_filt @ s - A_filt, s + S.T @ (w - G @ s)


def smooth_mean(r, T, Z, u, Kf, a_filt, TP):
    """What one step back of the disturbance smoother makes of the data.

    From r (m,) after the step and TP = T P_filt (m, m). Returns e (p,), the smoothed mean (m,) and
    r before the step.
    """
    s = r @ T
    e = u - s @ Kf
    return e, a_filt + r @ TP, s + e @ Z  # eq-adjoint-r-recursion


def smooth_predicted(g, N, T, C_inv, Kf, TP):
    """What N (m, m) after the step and TP = T P_filt (m, m) make of covariances; g is l's weight.

    Returns T'N (m, m), what T_bar (m, m) loses and Z_bar (p, m) gains by them, Kf'T'N T (p, m), and
    D (p, p).
    """
    TN = T.T @ N
    KTN = Kf.T @ TN
    KS = KTN @ T
    D = g * (C_inv.T @ C_inv) + symmetric(KS @ Kf)  # eq-adjoint-N
    of_Z = KTN @ TP - g * Kf.T
    return TN, N @ TP, of_Z, KS, D


def smooth_weighted(g, u, s, e):
    """What D (p, p) and Kf'T'N T (p, m) take in where weights differ.

    N then holds what r r' holds otherwise. Of u = F^-1 v (p,), s = T'r (m,) and the step's e (p,).
    """
    return with_transposed(outer(g / 2 * u - e, u)), outer(u, s)


def smooth_observed(TN, KS, D, T, Z):
    """Y = D Z / 2 - Kf'T'N T (p, m), and N (m, m) before the step."""
    Y = D @ Z / 2 - KS
    return Y, symmetric(TN @ T + with_transposed(Z.T @ Y))  # eq-adjoint-sparse


def smooth_covariance(N, T, Z, C_inv, Kf, TP):
    """What one step back of the disturbance smoother makes of covariances alone.

    From N (m, m) after the step and TP = T P_filt (m, m). Returns what T_bar (m, m) loses and Z_bar
    (p, m) gains by them, D (p, p), and N before the step.
    """
    TN, of_T, of_Z, KS, D = smooth_predicted(1.0, N, T, C_inv, Kf, TP)
    _, N_before = smooth_observed(TN, KS, D, T, Z)
    return of_T, of_Z, D, N_before


def smooth_gradient(r, N, e, a_smooth, of_T, of_Z, D):
    """The step's T_bar (m, m), Z_bar (p, m), H_bar (p, p) and W_bar (m, m) from both."""
    return (
        outer(r, a_smooth) - of_T,
        outer(e, a_smooth) + of_Z,
        (outer(e, e) - D) / 2,  # eq-adjoint-H
        (outer(r, r) - N) / 2,  # eq-adjoint-W
    )


def pull_smooth(r, N, T, Z, u, C_inv, Kf, a_filt, TP):
    """One step back of the disturbance smoother: the gradient of the plain log-likelihood.

    From r (m,) and N (m, m) after the step. Returns e (p,), the step's T_bar (m, m), Z_bar (p, m),
    H_bar (p, p) and W_bar (m, m), and r and N before the step; c_bar is r, d_bar is e.
    """
    e, a_smooth, r_before = smooth_mean(r, T, Z, u, Kf, a_filt, TP)
    of_T, of_Z, D, N_before = smooth_covariance(N, T, Z, C_inv, Kf, TP)
    gradient = smooth_gradient(r, N, e, a_smooth, of_T, of_Z, D)
    return e, *gradient, r_before, N_before
