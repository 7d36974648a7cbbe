import lightning
import torch
from lightning_tricks import seed_everything
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.demo import Digits, DigitsNet  # your data and your net
seed_everything(42)
data = Digits()
ensemble = VotingClassifier(DigitsNet, n_estimators=5, optimizer=("AdamW", {"lr": 3e-3}), seed=0)
lightning.Trainer(max_epochs=3, logger=False, enable_checkpointing=False).fit(ensemble, data)
digits, labels = next(iter(data.val_dataloader()))
known, noise = (ensemble.predict_uncertainty(x) for x in (digits, torch.rand_like(digits)))
print("right:", (known.mean.argmax(1) == labels).float().mean().item())
print("members disagree on digits by", known.epistemic.mean().item(), "and on noise by", noise.epistemic.mean().item())
