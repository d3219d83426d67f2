//! The controller against a simulated world: W1, W2, W4, W5, W6 and the rate.
#![cfg(test)]

mod rules;
mod sim;

use super::view::*;
use sim::{Fault, MIB, Random, Sim, SimDevice, TICK_MS};

/// Nothing live, nothing in the journal.
fn is_clean(sim: &Sim) -> bool {
    sim.devices.iter().all(|device| device.live() == 0) && sim.tail().is_none()
}

#[test]
fn w1_idle_device_drains_to_zero() {
    for seed in 0..24 {
        let mut random = Random::new(seed);
        let latency = 10 + random.below(8) * 10;
        let blocks = if seed % 4 == 0 { 1 } else { 1 + random.below(6000) };
        let mut sim = Sim::new(seed, 64 * MIB, vec![SimDevice::new(1, latency, 4096)]);
        sim.settings.percent = random.below(3) * 20;
        sim.settings.delay_ms = random.below(4) * 10_000;
        // From any state: some of it busy for a while, then left alone.
        for _ in 0..blocks {
            let place = sim.random.below(1 << 20);
            assert!(sim.write(0, place), "seed {seed}");
        }
        sim.devices[0].load = random.below(3) * 100_000;
        sim.run(random.below(4000));
        sim.devices[0].load = 0;
        let last = sim.devices[0].frontend_ms.unwrap();
        let waves = sim.devices[0].dirty_extents().div_ceil(64) + 1;
        // Idle from a second after the last I/O; then bytes/rate, a sync, and at most a second.
        let rate = waves * (latency + TICK_MS) + sim.devices[0].sync_ms;
        let deadline = sim.now.max(last + 1000) + rate + 1000;
        while sim.devices[0].live() > 0 {
            sim.tick();
            assert!(sim.now <= deadline, "seed {seed}: {} live", sim.devices[0].live());
        }
        sim.run(1500);
        assert!(is_clean(&sim), "seed {seed}: the journal is not empty");
    }
}

#[test]
fn w2_oldest_dirty_age_is_bounded() {
    for seed in 0..6 {
        // Twice as much may be dirty as is written in 30 s: only the deadline sends it home.
        let mut sim = Sim::new(seed, 512 * MIB, vec![SimDevice::new(1, 10, 65536)]);
        sim.settings.percent = if seed % 3 == 0 { 0 } else { 60 };
        sim.settings.delay_ms = if seed % 2 == 0 { 1000 } else { 100_000 };
        sim.devices[0].load = (2 + seed) * MIB;
        sim.run(70_000);
        let device = &sim.devices[0];
        // 5 extents in one pass, 10 ms a tick, 10 ms to write.
        assert!(device.oldest_age <= 30_000 + 200, "seed {seed}: {} ms", device.oldest_age);
        assert_eq!(device.longest_wait, 0, "seed {seed}");
        if seed % 2 == 1 && seed % 3 != 0 {
            assert!(device.oldest_age >= 29_000, "seed {seed}: {} ms", device.oldest_age);
        }
    }
}

fn faulty_world(seed: u64, faults: &[(usize, Fault)]) -> Sim {
    let mut devices: Vec<SimDevice> =
        (0..4).map(|id| SimDevice::new(id + 1, 10 + 10 * u64::from(id), 65536)).collect();
    let mut random = Random::new(seed);
    for device in &mut devices {
        device.load = (2 + random.below(7)) * MIB;
        device.places = 1 << (6 + random.below(10));
    }
    for (index, _) in faults {
        devices[*index].load = MIB;
        devices[*index].places = 1 << 20;
    }
    Sim::new(seed, 64 * MIB, devices)
}

#[test]
fn w4_one_dead_device_never_stops_the_others() {
    for seed in 0..4 {
        let second = if seed % 2 == 0 { Fault::Hung } else { Fault::NoSync };
        let faults = [(0, Fault::Dead), (3, second)];
        let mut sim = faulty_world(seed, &faults);
        sim.run(5000);
        faults.iter().for_each(|(index, fault)| sim.devices[*index].fault = *fault);
        let before = [sim.devices[1].acked, sim.devices[2].acked];
        // Ten times the journal, together.
        let all = 320 * MIB;
        while sim.devices[1].acked - before[0] < all || sim.devices[2].acked - before[1] < all {
            sim.tick();
            assert!(sim.now < 2_000_000, "seed {seed}: the others stopped");
        }
        for device in &sim.devices[1..3] {
            assert!(device.longest_wait <= 1000, "seed {seed}: {} ms", device.longest_wait);
            assert_eq!(device.refused, 0, "seed {seed}: a well device was refused");
        }
        for (index, fault) in faults {
            let device = &sim.devices[index];
            assert!(sim.controller.is_degraded(device.id), "seed {seed}: {fault:?}");
            assert!(device.refused > 0, "seed {seed}: {fault:?} had no limit");
            assert!(device.share() <= 16 * MIB, "seed {seed}: {fault:?} {}", device.share());
        }
        assert!(sim.copied > 0, "seed {seed}: nothing was copied forward");
        // Repaired, all of it goes home by itself, within the longest backoff.
        sim.devices.iter_mut().for_each(|device| device.fault = Fault::None);
        sim.devices.iter_mut().for_each(|device| device.load = 0);
        sim.run(75_000);
        assert!(is_clean(&sim), "seed {seed}: not clean after the repair");
        assert!(!sim.controller.is_degraded(sim.devices[0].id), "seed {seed}");
    }
}

#[test]
fn w4_who_hangs_with_all_slots_leaves_some_to_later_ones() {
    let devices = (1..=3).map(|id| SimDevice::new(id, 20, 4096)).collect();
    let mut sim = Sim::new(1, 64 * MIB, devices);
    for _ in 0..2000 {
        let place = sim.random.below(1 << 20);
        assert!(sim.write(0, place));
    }
    sim.devices[0].fault = Fault::Hung;
    sim.run(3000);
    assert_eq!(sim.devices[0].in_flight(), 64);
    for device in 1..3 {
        (0..200).for_each(|place| assert!(sim.write(device, place)));
    }
    sim.run(5000);
    assert_eq!((sim.devices[1].live(), sim.devices[2].live()), (0, 0));
    assert_eq!(sim.devices[0].in_flight(), 64);
    // When all of them end, it goes on.
    sim.devices[0].fault = Fault::None;
    sim.run(5000);
    assert_eq!(sim.devices[0].live(), 0);
}

#[test]
fn w4_half_of_the_slots_while_another_has_work() {
    let mut sim = Sim::new(1, 64 * MIB, (1..=2).map(|id| SimDevice::new(id, 50, 4096)).collect());
    for index in 0..2 {
        (0..3000).for_each(|place| assert!(sim.write(index, place)));
    }
    sim.flushing_all = true;
    for _ in 0..100 {
        sim.tick();
        let both = sim.devices.iter().all(|device| device.dirty_extents() > 64);
        let most = sim.devices.iter().map(SimDevice::in_flight).max().unwrap();
        assert!(!both || most <= 32, "{most} of one device");
    }
    assert!(sim.most_in_flight >= 56, "{}", sim.most_in_flight);
}

#[test]
fn w5_leaving_idle_stops_the_boost() {
    for percent in [0, 10] {
        let mut sim = Sim::new(1, 256 * MIB, vec![SimDevice::new(1, 50, 4096)]);
        sim.settings.percent = percent;
        for _ in 0..20_000 {
            let place = sim.random.below(1 << 20);
            assert!(sim.write(0, place));
        }
        sim.run(1500);
        assert!(sim.devices[0].in_flight() >= 50, "not boosted");
        sim.devices[0].load = 4096 * 20;
        sim.run(60);
        let before = sim.devices[0].issued;
        for _ in 0..100 {
            sim.tick();
            let extents = sim.log.iter().map(|action| match action {
                Action::Pass { extents, .. } => *extents,
                _ => 0,
            });
            assert!(extents.max().unwrap_or(0) <= 5, "a boosted pass");
        }
        let issued = sim.devices[0].issued - before;
        if percent > 0 {
            // 1 MiB/s: 256 extents a second, and what had been saved up.
            assert!((100..=256 + 256 + 5).contains(&issued), "{issued} extents");
            assert!(sim.devices[0].in_flight() <= 30);
        } else {
            assert!(issued > 300, "{issued} extents");
        }
    }
}

#[test]
fn w6_a_blocked_writer_goes_on() {
    for seed in 0..4 {
        let mut sim = faulty_world(seed, &[]);
        // Far more than the devices take (at most 64 * 64 KiB in 10 ms, shared).
        sim.devices.iter_mut().for_each(|device| device.load = 400 * MIB);
        sim.devices.iter_mut().for_each(|device| device.latency_ms += 100);
        sim.settings.running = seed % 2 == 0;
        sim.run(3000);
        for _ in 0..8 {
            let before: Vec<u64> = sim.devices.iter().map(|device| device.acked).collect();
            sim.run(3000);
            for (device, before) in sim.devices.iter().zip(before) {
                assert!(device.acked > before, "seed {seed}: device {} is stopped", device.id);
            }
        }
        assert!(sim.devices.iter().any(|device| device.longest_wait > 0), "nobody had to wait");
    }
}

#[test]
fn the_rate_converges_to_the_target() {
    let mut sim = Sim::new(1, 1024 * MIB, vec![SimDevice::new(1, 10, 65536)]);
    sim.tick_ms = 100;
    sim.settings.percent = 4;
    let target = 1024 * MIB / 100 * 4;
    sim.devices[0].load = 5 * MIB / 2;
    let (mut sum, mut most, mut samples) = (0, 0, 0);
    for second in 0..2500 {
        sim.run(1000);
        let dirty = sim.devices[0].view().dirty_bytes;
        assert!(sim.controller.rate() >= MIB, "second {second}");
        if second >= 2000 {
            sim.devices[0].oldest_age *= u64::from(second > 2000);
            sum += dirty;
            samples += 1;
            most = most.max(dirty);
        }
    }
    let mean = sum / samples;
    assert!((target * 95 / 100..target * 105 / 100).contains(&mean), "{mean} of {target}");
    assert!(most < target * 12 / 10, "{most} of {target}");
    assert!(sim.devices[0].oldest_age < 30_000, "the deadline did it, not the rate");
}

#[test]
fn what_it_is_told_in_any_order_breaks_nothing() {
    // Random schedules: faults come and go, options change, loads change; then all is well again.
    for seed in 0..12 {
        let mut sim = faulty_world(seed, &[]);
        let mut random = Random::new(seed + 1000);
        for _ in 0..60 {
            let index = random.below(4) as usize;
            let faults = [Fault::None, Fault::Dead, Fault::Hung, Fault::NoSync];
            match random.below(6) {
                0 => sim.devices[index].fault = faults[random.below(4) as usize],
                1 => sim.devices[index].fault = Fault::None,
                2 => sim.devices[index].load = random.below(5) * 5 * MIB,
                3 => sim.devices[index].flushing = random.below(2) == 0,
                4 => sim.settings.running = random.below(2) == 0,
                _ => sim.settings.percent = random.below(40),
            }
            sim.run(random.below(2000));
        }
        sim.settings.running = true;
        for device in &mut sim.devices {
            device.fault = Fault::None;
            device.load = 0;
        }
        sim.run(75_000);
        assert!(is_clean(&sim), "seed {seed}: not clean");
        for device in &sim.devices {
            assert!(!sim.controller.is_degraded(device.id), "seed {seed}: still degraded");
        }
    }
}
