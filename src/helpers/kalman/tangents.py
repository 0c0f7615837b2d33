r"""Tangents of the filter's step and of its pullback: what second derivatives are made of.

A tangent dX is what X moves by when the model moves along a direction.  The tangent of the gradient
along a direction is the Hessian times that direction (Pearlmutter 1994, Fast exact multiplication
by the Hessian, doi:10.1162/neco.1994.6.1.147).  Each line is the product rule applied to a line of
:mod:`helpers.kalman.recursions`, with F^-1 moving by -F^-1 dF F^-1.

The lines hold operators only, as those of the text that they differentiate.  What is missing at a
gap is zero in the tangents of y, d, Z and H as well.
"""

from helpers.kalman.recursions import outer, symmetric, times_J


def push_covariance(dP, dZ, dH, C_inv, Kf, P, Z):
    """The tangent of ``factor``: what the update does to covariances.

    Returns M = P Z' and dM (m, p), dF (p, p), dE = C^-1 dF C'^-1 (p, p), dKf (m, p) and
    dP_filt (m, m).
    """
    M = P @ Z.T
    dM = dP @ Z.T + P @ dZ.T
    dF = symmetric(Z @ dM + dZ @ M + dH)
    dE = symmetric(C_inv @ dF @ C_inv.T)
    dKf = (dM - Kf @ dF) @ C_inv.T @ C_inv
    dP_filt = dP + Kf @ dF @ Kf.T - 2 * symmetric(dM @ Kf.T)
    return M, dM, dF, dE, dKf, dP_filt


def push_mean(dy, da, dd, dZ, M, dM, dF, dE, u, C_inv, a, Z):
    """The tangent of ``update``, from those of the covariances: du (p,), da_filt (m,) and dl."""
    dv = dy - dd - dZ @ a - Z @ da
    du = (dv - dF @ u) @ C_inv.T @ C_inv
    dl = -dE.trace() / 2 + (dF @ u / 2 - dv) @ u
    return du, da + dM @ u + M @ du, dl


def push_predict_covariance(dP_filt, dT, dW, P_filt, T):
    """The tangent of ``predict``: dP (m, m) of the next step."""
    return symmetric(2 * dT @ P_filt @ T.T + T @ dP_filt @ T.T) + dW


def push_predict_mean(da_filt, dc, dT, a_filt, T):
    """The tangent of ``predict``: da (m,) of the next step."""
    return dT @ a_filt + T @ da_filt + dc


def push_pull_predict(dr, dPi, dT, da_filt, dP_filt, r, Pi, T, a_filt, P_filt):
    """The tangent of ``pull_predict``: dT_bar (m, m), ds (m,) and dPt (m, m)."""
    dX = dT @ P_filt + T @ dP_filt
    dT_bar = outer(dr, a_filt) + outer(r, da_filt) + 2 * (dPi @ T @ P_filt + Pi @ dX)
    return dT_bar, dr @ T + r @ dT, symmetric(2 * dT.T @ Pi @ T + T.T @ dPi @ T)


def push_pull_update(
    ds, dPt, dE, du, dKf, da_filt, dP_filt, dZ,
    s, Pt, g, w, u, C_inv, S, Kf, G, a_filt, P_filt, Z,
):  # fmt: skip
    """The tangent of ``pull_update``.

    Returns de (p,), dZ_bar (p, m), dH_bar (p, p), and the tangents of the cotangents of a (m,) and
    P (m, m).
    """
    dJ, dS = -dKf @ Z - Kf @ dZ, C_inv @ dZ
    k, b, z = s @ Kf, times_J(s, S, G), w @ S
    dk, db, dz = s @ dKf + ds @ Kf, s @ dJ + times_J(ds, S, G), u @ dZ + du @ Z
    e, de = g * u - k, g * du - dk
    dZ_bar = outer(de, a_filt) + outer(e, da_filt) - g * dKf.T
    dZ_bar = dZ_bar + outer(du, P_filt @ s) + outer(u, dP_filt @ s + P_filt @ ds)
    dZ_bar = dZ_bar - 2 * ((dKf.T @ Pt + Kf.T @ dPt) @ P_filt + Kf.T @ Pt @ dP_filt)
    dH_bar = symmetric(
        2 * dKf.T @ Pt @ Kf + Kf.T @ dPt @ Kf - outer(dk, u) - outer(k, du)
        + g * (outer(du, u) + C_inv.T @ dE @ C_inv / 2)
    )  # fmt: skip
    dP_bar = symmetric(
        times_J(2 * dJ.T @ Pt + times_J(dPt, S, G).T, S, G)
        + outer(db + g / 2 * dz, z) + outer(b + g / 2 * z, dz)
        - g * (dS.T @ S - S.T @ dE @ S / 2)
    )  # fmt: skip
    return de, dZ_bar, dH_bar, db + g * dz, dP_bar


def push_smooth_mean(dr, dT, du, dKf, da_filt, dTP, dZ, r, T, Z, e, Kf, TP):
    """The tangent of ``smooth_mean``: de (p,), that of the smoothed mean (m,), and dr before."""
    ds = dr @ T + r @ dT
    de = du - ds @ Kf - r @ T @ dKf
    return de, da_filt + dr @ TP + r @ dTP, ds + de @ Z + e @ dZ


def push_smooth_covariance(dN, dT, dE, dKf, dTP, dZ, N, T, Z, C_inv, Kf, TP):
    """The tangent of ``smooth_covariance``.

    Returns those of what T_bar (m, m) loses and Z_bar (p, m) gains, of D (p, p), and of N (m, m)
    before the step.
    """
    NT, NTP, dNTP = N @ T, N @ TP, dN @ TP + N @ dTP
    X, dX = symmetric(T.T @ NT), symmetric(2 * dT.T @ NT + T.T @ (dN @ T))
    KX, dKX = Kf.T @ X, dKf.T @ X + Kf.T @ dX
    D = C_inv.T @ C_inv + symmetric(KX @ Kf)
    dD = symmetric(dKX @ Kf + KX @ dKf) - C_inv.T @ dE @ C_inv
    Y, dY = D @ Z / 2 - KX, (dD @ Z + D @ dZ) / 2 - dKX
    of_Z = dKf.T @ T.T @ NTP + Kf.T @ (dT.T @ NTP + T.T @ dNTP) - dKf.T
    return dNTP, of_Z, dD, dX + 2 * symmetric(dZ.T @ Y + Z.T @ dY)


def push_smooth_gradient(dr, dN, de, da_smooth, of_T, of_Z, dD, r, e, a_smooth):
    """The tangent of ``smooth_gradient``, from those of what it takes.

    Returns those of T_bar (m, m), Z_bar (p, m), H_bar (p, p) and W_bar (m, m).
    """
    return (
        outer(dr, a_smooth) + outer(r, da_smooth) - of_T,
        outer(de, a_smooth) + outer(e, da_smooth) + of_Z,
        symmetric(outer(de, e)) - dD / 2,
        symmetric(outer(dr, r)) - dN / 2,
    )
