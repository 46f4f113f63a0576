// A GPU that does not exist, as torch's dispatcher, autograd engine and accelerator API see a real one.
//
// The device guard answers every question about streams and events; no kernel runs on it. CUDA_VISIBLE_DEVICES
// is read when the device is first counted, as by the driver: later changes have no effect in this process.
// Of the values that hide the only device, "" and an index other than 0 are modelled.
#include <cstdlib>
#include <cstring>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

static bool counted = false;

static int devices() {
  static const int number = [] {
    const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
    const bool is_first = value && (!std::strncmp(value, "GPU-", 4) || !std::strncmp(value, "MIG-", 4) ||
                                    (value[0] == '0' && (!value[1] || value[1] == ',')));
    return !value || is_first ? 1 : 0;
  }();
  counted = true;
  return number;
}

// Numbers for Python, by ctypes.
extern "C" int imaginary_devices() { return devices(); }
extern "C" int imaginary_counted() { return counted; }

namespace {

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;

struct ImaginaryGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(CUDA, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return getDefaultStream(getDevice()); }
  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return devices(); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, ImaginaryGuard);

}  // namespace

namespace at {

struct ImaginaryHooks : CUDAHooksInterface {
  explicit ImaginaryHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return devices(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices(); }
  bool hasPrimaryContext(DeviceIndex) const override { return devices(); }
  DeviceIndex deviceCount() const override { return devices(); }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return devices(); }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ImaginaryHooks);

}  // namespace at
