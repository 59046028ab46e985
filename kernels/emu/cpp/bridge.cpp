// See bridge.h.
#include "bridge.h"

#include <stdexcept>

#include "machine.h"
#include "spec-emu/src/machine.rs.h"

namespace emu {

namespace {

std::string text(rust::Str name) {
    return std::string(name.data(), name.size());
}

}  // namespace

bool has_variant(rust::Str name) {
    return find_entry(text(name)) != nullptr;
}

void run_launches(rust::Slice<const RawLaunch> launches, const RawSchedule& schedule) {
    std::vector<Launch> all;
    for (const RawLaunch& raw : launches) {
        Launch launch;
        launch.entry = find_entry(text(raw.variant));
        if (!launch.entry) {
            throw std::runtime_error("no kernel is called " + text(raw.variant));
        }
        launch.grid = raw.grid;
        launch.block = raw.block;
        launch.shared_bytes = raw.shared_bytes;
        launch.params.assign(raw.params.begin(), raw.params.end());
        launch.overlap = raw.overlap;
        launch.max_resident = raw.max_resident;
        all.push_back(std::move(launch));
    }
    const Landing landing = static_cast<Landing>(schedule.landing);
    const Schedule chosen{schedule.seed, landing, schedule.disturbed};
    const std::string failure = run(all, chosen);
    if (!failure.empty()) {
        throw std::runtime_error(failure);
    }
}

}  // namespace emu
