"""Vector floating-point instructions."""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.integer import Formula


def fmax(a: Val, b: Val) -> Val:
    return a.intr("maxnum", b)


def fmin(a: Val, b: Val) -> Val:
    return a.intr("minnum", b)


def fma(a: Val, b: Val, c: Val) -> Val:
    return a.intr("fma", b, c)


FLOATING: dict[str, tuple[str, Formula]] = {
    "add_f32": ("f<-ff", lambda a, b: a + b),
    "sub_f32": ("f<-ff", lambda a, b: a - b),
    "subrev_f32": ("f<-ff", lambda a, b: b - a),
    "mul_f32": ("f<-ff", lambda a, b: a * b),
    "fma_f32": ("f<-fff", fma),
    "fmac_f32": ("f<-ffD", fma),
    "fmaak_f32": ("f<-fff", fma),
    "fmamk_f32": ("f<-fff", fma),
    "add_f64": ("d<-dd", lambda a, b: a + b),
    "mul_f64": ("d<-dd", lambda a, b: a * b),
    "fma_f64": ("d<-ddd", fma),
    "max_num_f32": ("f<-ff", fmax),
    "min_num_f32": ("f<-ff", fmin),
    "max3_num_f32": ("f<-fff", lambda a, b, c: fmax(fmax(a, b), c)),
    "min3_num_f32": ("f<-fff", lambda a, b, c: fmin(fmin(a, b), c)),
    "med3_num_f32": ("f<-fff", lambda a, b, c: fmax(fmin(a, b), fmin(fmax(a, b), c))),
    "rcp_f32": ("f<-f", lambda a: 1.0 / a),
    "rcp_iflag_f32": ("f<-f", lambda a: 1.0 / a),
    "sqrt_f32": ("f<-f", lambda a: a.intr("sqrt")),
    "rsq_f32": ("f<-f", lambda a: 1.0 / a.intr("sqrt")),
    "exp_f32": ("f<-f", lambda a: a.intr("exp2")),
    "log_f32": ("f<-f", lambda a: a.intr("log2")),
    "rndne_f32": ("f<-f", lambda a: a.intr("rint")),
    "floor_f32": ("f<-f", lambda a: a.intr("floor")),
    "ceil_f32": ("f<-f", lambda a: a.intr("ceil")),
    "trunc_f32": ("f<-f", lambda a: a.intr("trunc")),
    "ldexp_f32": ("f<-fi", lambda a, b: a.intr("ldexp", b.splat(a.lanes))),
    # the scale / fmas / fixup sequence rounds correctly; here fixup divides, the steps before only pass values on
    "div_scale_f32": ("fm<-fff", lambda a, b, c: (a, a.cmp("false", a))),
    "div_fmas_f32": ("f<-fff", fma),
    "div_fixup_f32": ("f<-fff", lambda q, den, num: num / den),
}
