//! Which modules a model needs, so that all are compiled side by side when it is loaded.

use super::launch::gemv::{self, unit};
use super::launch::{act, attend, flash, mla, norm, rope, router};
use super::model::{DevFfn, DevModel};
use super::module::Unit;
use super::scratch;
use crate::backend::KvType;
use crate::format::codec::TABLE;
use crate::model::{AttnHyper, Hyper};

/// Every unit that a step may launch.
pub fn of(m: &DevModel, h: &Hyper, kv: KvType, rows_max: usize, exact: bool) -> Vec<Unit> {
    let mut all = vec![norm::UNIT, act::UNIT, Unit::of("quantize"), rope::unit(kv)];
    let heads = scratch::heads(h);
    all.extend([attend::unit(&heads, kv), attend::plain(&heads, kv), attend::MERGE]);
    all.push(unit("embed", m.embed.codec()));
    let many = rows_max > gemv::ROWS_MAX && !exact;
    for codec in m.codecs() {
        let codec = TABLE[codec as usize].codec;
        all.push(unit("gemv", codec));
        if many {
            all.push(unit("gemm", codec));
        }
    }
    match h.attn {
        AttnHyper::Gqa { n_heads, head_dim, .. } => {
            all.extend(flash::unit(kv, head_dim, head_dim, &[n_heads * head_dim], true));
        }
        AttnHyper::Mla { nope_dim, rope_dim, v_dim, .. } => {
            all.extend(flash::unit(kv, nope_dim + rope_dim, v_dim, &[rope_dim], false));
            all.push(mla::UNIT);
        }
    }
    if let Some(moe) = &h.moe {
        all.extend([router::UNIT, Unit::of("group")]);
        for l in &m.layers {
            if let DevFfn::Moe(d) = &l.ffn {
                all.extend(router::few_unit(moe, d.router.codec(), 1));
                all.extend([d.shape.gate.codec(), d.shape.down.codec()].map(|c| unit("expert", c)));
            }
        }
    }
    all
}
