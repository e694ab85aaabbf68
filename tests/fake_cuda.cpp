// A CUDA device in name only, for builds of torch without CUDA: autograd finds one device, whose streams do nothing.
//
// With it preloaded, fake tensors on "cuda:0" can be differentiated, so that a step is traced as on a GPU. Nothing can
// be allocated or computed there. tests/fake_cuda.py builds and preloads it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::Device FIRST(CUDA, 0);

// torch's own guard without effects, but for the number of the device: autograd has a queue of work for each number.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return FIRST; }
  c10::Device exchangeDevice(c10::Device) const override { return FIRST; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, FIRST); }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override { return given; }
};

// What torch's core asks of its CUDA library.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {
using ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
} // namespace at
